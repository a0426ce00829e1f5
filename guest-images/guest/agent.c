/*
 * Runs scripts inside the nested lab's first-level guest, for the host at the other end of a virtio
 * serial port.
 *
 *   agent PORT
 *
 * Both directions carry frames: a type (1 byte), the payload's length (4 bytes, little-endian), the
 * payload. src/lab/wire.rs has the other end.
 *
 * From the host:                              To the host:
 *   R  run a script: flags (1 byte; 1 = on      r  ready
 *      a terminal), rows, columns (2 bytes      o  the script's standard output
 *      each), the script                        e  the script's standard error
 *   I  standard input for it                    x  the script ended: status (4 bytes), as a
 *   E  end of its standard input                   shell says it (128 + number for a signal)
 *   S  a signal for it: number (1 byte)         d  a piece of a file
 *   G  send a file: path                        f  end of the file: errno (4 bytes)
 *
 * The agent ends when the host closes the port. It and what it runs stay off the first processor.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define FRAME_MAX (1 << 20)
#define PIECE 65536

static int port;

/* The script that runs; pid is 0 if none does, descriptors are -1 if closed. */
static struct {
	pid_t pid;
	int terminal; /* whether in, out and the terminal's master are one descriptor */
	int in, out, err;
	/* Standard input that the script has not taken yet. */
	char *pending;
	size_t pending_length;
	int input_ended;
} script = { .in = -1, .out = -1, .err = -1 };

static void die(const char *what)
{
	fprintf(stderr, "agent: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void write_all(const void *bytes, size_t length)
{
	while (length > 0) {
		ssize_t done = write(port, bytes, length);
		if (done < 0 && errno == EINTR)
			continue;
		if (done <= 0)
			die("write to the host");
		bytes = (const char *)bytes + done;
		length -= done;
	}
}

static void send_frame(char type, const void *payload, uint32_t length)
{
	char header[5] = { type };
	memcpy(header + 1, &length, 4);
	write_all(header, sizeof header);
	write_all(payload, length);
}

static void send_number(char type, uint32_t number)
{
	send_frame(type, &number, sizeof number);
}

static void read_all(void *bytes, size_t length)
{
	while (length > 0) {
		ssize_t got = read(port, bytes, length);
		if (got < 0 && (errno == EINTR || errno == EAGAIN))
			continue;
		if (got < 0)
			die("read from the host");
		if (got == 0)
			exit(0); /* the host has gone */
		bytes = (char *)bytes + got;
		length -= got;
	}
}

static void close_and_forget(int *descriptor)
{
	if (*descriptor >= 0)
		close(*descriptor);
	*descriptor = -1;
}

static void forget_input(void)
{
	script.pending_length = 0;
	if (!script.terminal)
		close_and_forget(&script.in);
}

/* Hands the script what it will take. */
static void feed(void)
{
	while (script.pending_length > 0) {
		ssize_t done = write(script.in, script.pending, script.pending_length);
		if (done < 0 && errno == EAGAIN)
			return;
		if (done < 0 && errno == EINTR)
			continue;
		if (done <= 0) {
			forget_input();
			return;
		}
		script.pending_length -= done;
		memmove(script.pending, script.pending + done, script.pending_length);
	}
	if (script.input_ended)
		forget_input();
}

static void take_input(const char *bytes, uint32_t length)
{
	if (script.in < 0 || length == 0)
		return;
	script.pending = realloc(script.pending, script.pending_length + length);
	if (!script.pending)
		die("realloc");
	memcpy(script.pending + script.pending_length, bytes, length);
	script.pending_length += length;
	feed();
}

/* Passes on what one descriptor holds, up to a piece. Returns 0 at its end. */
static int pass_on(int *descriptor, char type)
{
	static char buffer[PIECE];
	ssize_t got = read(*descriptor, buffer, sizeof buffer);
	if (got > 0) {
		send_frame(type, buffer, got);
		return 1;
	}
	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return 1;
	/* A terminal's master says EIO when the last process has closed it. */
	close_and_forget(descriptor);
	return 0;
}

static void set_nonblocking(int descriptor)
{
	fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK);
}

static void run(const unsigned char *payload, uint32_t length)
{
	if (length < 5 || script.pid != 0) {
		send_number('x', 255);
		return;
	}
	struct winsize size = { 0 };
	script.terminal = payload[0] & 1;
	size.ws_row = payload[1] | payload[2] << 8;
	size.ws_col = payload[3] | payload[4] << 8;
	char *text = strndup((const char *)payload + 5, length - 5);
	char *words[] = { "sh", "-c", text, NULL };
	script.input_ended = 0;

	if (script.terminal) {
		int master;
		script.pid = forkpty(&master, NULL, NULL, &size);
		if (script.pid < 0)
			die("forkpty");
		if (script.pid > 0) {
			script.in = script.out = master;
			set_nonblocking(master);
		}
	} else {
		int in[2], out[2], err[2];
		if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC))
			die("pipe");
		script.pid = fork();
		if (script.pid < 0)
			die("fork");
		if (script.pid == 0) {
			setsid();
			dup2(in[0], 0);
			dup2(out[1], 1);
			dup2(err[1], 2);
		} else {
			close(in[0]);
			close(out[1]);
			close(err[1]);
			script.in = in[1];
			script.out = out[0];
			script.err = err[0];
			set_nonblocking(script.in);
			set_nonblocking(script.out);
			set_nonblocking(script.err);
		}
	}
	if (script.pid == 0) {
		sigset_t none;
		sigemptyset(&none);
		sigprocmask(SIG_SETMASK, &none, NULL);
		signal(SIGPIPE, SIG_DFL);
		execv("/bin/sh", words);
		_exit(127);
	}
	free(text);
}

/* Tells the host that the script has ended, once all that it wrote is passed on. */
static void reap(void)
{
	int status;
	pid_t pid;
	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		if (pid != script.pid)
			continue;
		/* What processes left behind write later has nobody to go to. */
		int *descriptors[] = { &script.out, &script.err };
		for (int i = 0; i < 2; i++) {
			struct pollfd one = { .events = POLLIN };
			while ((one.fd = *descriptors[i]) >= 0 && poll(&one, 1, 0) > 0)
				pass_on(descriptors[i], i == 0 ? 'o' : 'e');
		}
		if (script.terminal)
			script.in = -1; /* the same descriptor as out */
		script.terminal = 0;
		forget_input();
		close_and_forget(&script.out);
		close_and_forget(&script.err);
		script.pid = 0;
		send_number('x', WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
	}
}

static void send_file(const char *path)
{
	static char buffer[PIECE];
	int file = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t got = file < 0 ? -1 : 0;
	while (file >= 0 && (got = read(file, buffer, sizeof buffer)) > 0)
		send_frame('d', buffer, got);
	send_number('f', got < 0 ? errno : 0);
	if (file >= 0)
		close(file);
}

static void take_frame(void)
{
	unsigned char header[5];
	uint32_t length;
	read_all(header, sizeof header);
	memcpy(&length, header + 1, 4);
	if (length > FRAME_MAX) {
		errno = EMSGSIZE;
		die("frame from the host");
	}
	char *payload = malloc(length + 1);
	if (!payload)
		die("malloc");
	read_all(payload, length);
	payload[length] = 0;
	switch (header[0]) {
	case 'R':
		run((unsigned char *)payload, length);
		break;
	case 'I':
		take_input(payload, length);
		break;
	case 'E':
		if (script.terminal)
			take_input("\004", 1); /* what a person types to end the input */
		else
			script.input_ended = 1;
		if (script.in >= 0)
			feed();
		break;
	case 'S':
		/* The script leads a session, and so a process group. */
		if (script.pid > 0 && length == 1)
			kill(-script.pid, payload[0]);
		break;
	case 'G':
		send_file(payload);
		break;
	}
	free(payload);
}

/* Of several processors, the first is for the kernel alone: src/lab/mod.rs says why. */
static void leave_first_processor(void)
{
	cpu_set_t processors;
	if (sched_getaffinity(0, sizeof processors, &processors))
		die("sched_getaffinity");
	if (CPU_COUNT(&processors) == 1)
		return;
	CPU_CLR(0, &processors);
	if (sched_setaffinity(0, sizeof processors, &processors))
		die("sched_setaffinity");
}

static void note_child(int number)
{
	(void)number;
}

int main(int count, char **words)
{
	if (count != 2) {
		fprintf(stderr, "usage: agent PORT\n");
		return 2;
	}
	port = open(words[1], O_RDWR | O_CLOEXEC);
	if (port < 0)
		die(words[1]);
	leave_first_processor();
	signal(SIGPIPE, SIG_IGN);
	/* A child's end is noticed nowhere but in ppoll, so that it can't be missed between two. */
	sigset_t child, none;
	sigemptyset(&none);
	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	sigprocmask(SIG_BLOCK, &child, NULL);
	struct sigaction action = { .sa_handler = note_child };
	sigaction(SIGCHLD, &action, NULL);

	send_frame('r', NULL, 0);
	for (;;) {
		int hungry = script.pending_length > 0;
		struct pollfd polls[] = {
			/* No more is taken in than the script takes. */
			{ .fd = script.pending_length < PIECE ? port : -1, .events = POLLIN },
			{ .fd = script.out, .events = POLLIN },
			{ .fd = script.err, .events = POLLIN },
			{ .fd = hungry ? script.in : -1, .events = POLLOUT },
		};
		int ready = ppoll(polls, 4, NULL, &none);
		if (ready < 0 && errno != EINTR)
			die("poll");
		if (ready > 0) {
			if (polls[1].revents && script.out >= 0 && !pass_on(&script.out, 'o') &&
			    script.terminal)
				script.in = -1;
			if (polls[2].revents && script.err >= 0)
				pass_on(&script.err, 'e');
			if (polls[3].revents && script.in >= 0)
				feed();
			if (polls[0].revents)
				take_frame();
		}
		reap();
	}
}
