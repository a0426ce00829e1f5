/*
 * Workloads whose calls into the kernel are known, for guests under test.
 *
 *   work LIST
 *
 * LIST is a comma-separated sequence of groups; the items of a group, joined by '+', run at the same
 * time. An item is NAME[:ARGUMENT]...[@CPU]; with @CPU it runs on that CPU and no other.
 *
 *   proc-read:FILE:N   N times open, read to the end, close: one call of FILE's show function each
 *   syscalls:N         N calls of getppid(2)
 *   forks:N            N children that end at once
 *                      (proc-read, forks: with FILE in place of N, until FILE exists)
 *   faults:N           N page faults: first touches of anonymous memory, one page each
 *   spin:SECONDS       computes and calls nothing
 *   idle:SECONDS       sleeps
 *   pipe               reads from a pipe into which nobody writes, and never ends
 *   threads:N          N threads that sleep, and never end
 *   scribble:ADDRESS:LENGTH:SECONDS
 *                      writes random words all over that guest-physical memory, through /dev/mem
 *   wait-console-line[:FILE]
 *                      prints VMM-READY, waits for a line on standard input, and makes FILE then
 *   exec:PATH          runs a shell script
 *   shell              runs each line of standard input as a shell script, until one says "exit", and
 *                      prints "VMM-SHELL-END STATUS" behind what it prints
 *   lseeks:N           N calls of lseek(2) on /dev/null, to 0 and up to N - 1, one call of null_lseek
 *                      each; prints "VMM-LSEEKS ns=T" for all of them
 *   put:FILE:TEXT      writes a line to a file in one write, and prints "VMM-PUT FILE ns=T" for that
 *   gap:FILE           looks at the clock until FILE exists, and prints "VMM-GAP ns=T", the longest time
 *                      from one look to the next
 *   null-lseek:FILE    asks for offsets in /dev/null until FILE exists
 *   loadavg:FILE       reads /proc/loadavg and sysinfo(2) in turn until FILE exists
 *   pipe-read:FILE     reads a byte from a pipe, which comes when FILE exists
 *
 * The two that ask the kernel the same again and again sort its answers into those of the stock kernel
 * and those of samples/livepatch, and say "VMM-ANSWERS ITEM old=N new=N wrong=N switches=N": what is
 * neither is wrong, and a switch is an answer of another kind than the one before.
 *
 * Each item's process is named NAME and prints "VMM-WORK-BEGIN ITEM", then "VMM-WORK-END ITEM count=N ms=T" or
 * "VMM-WORK-FAILED ITEM: REASON". The exit status is 1 if any item failed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define MAX_GROUP 64

/* The item that this process runs, as it was written, and its parts. */
static const char *item;
static char *arguments[8];
static int argument_count;

/* A line goes out in one write, so that those of parallel items do not mix. */
static void say(const char *format, ...)
{
	char line[512];
	va_list values;
	va_start(values, format);
	int length = vsnprintf(line, sizeof line, format, values);
	va_end(values);
	if (length >= (int)sizeof line)
		length = sizeof line - 1;
	if (write(STDOUT_FILENO, line, length) < 0)
		exit(1);
}

static void fail(const char *format, ...)
{
	char reason[256];
	va_list values;
	va_start(values, format);
	vsnprintf(reason, sizeof reason, format, values);
	va_end(values);
	say("VMM-WORK-FAILED %s: %s\n", item, reason);
	exit(1);
}

static const char *argument(int index)
{
	if (index >= argument_count)
		fail("argument %d is missing", index + 1);
	return arguments[index];
}

static long number(int index)
{
	char *end;
	const char *text = argument(index);
	long value = strtol(text, &end, 10);
	if (*text == 0 || *end != 0 || value < 0)
		fail("\"%s\" is not a number", text);
	return value;
}

static int exists(const char *path)
{
	return access(path, F_OK) == 0;
}

/* Whether there is more to do when so much was done: the argument is a number, or a file to come. */
static int is_more(int index, long done)
{
	const char *end = argument(index);
	if (*end == '/')
		return done % 64 != 0 || !exists(end);
	return done < number(index);
}

static long milliseconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static long nanoseconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000 + now.tv_nsec;
}

static long proc_read(void)
{
	const char *path = argument(0);
	long count;
	char buffer[4096];
	for (count = 0; is_more(1, count); count++) {
		int file = open(path, O_RDONLY);
		if (file < 0)
			fail("open: %s", strerror(errno));
		ssize_t got;
		while ((got = read(file, buffer, sizeof buffer)) > 0)
			;
		if (got < 0)
			fail("read: %s", strerror(errno));
		close(file);
	}
	return count;
}

static long syscalls(void)
{
	long count = number(0);
	for (long i = 0; i < count; i++)
		syscall(SYS_getppid);
	return count;
}

static long forks(void)
{
	long count;
	for (count = 0; is_more(0, count); count++) {
		pid_t child = fork();
		if (child < 0)
			fail("fork: %s", strerror(errno));
		if (child == 0)
			_exit(0);
		if (waitpid(child, NULL, 0) != child)
			fail("waitpid: %s", strerror(errno));
	}
	return count;
}

/* Memory is taken and given back in pieces, so that a small guest can fault without end. */
static long faults(void)
{
	const long piece = 1024;
	long page = sysconf(_SC_PAGESIZE);
	long count = number(0), left = count;
	struct rusage before, after;
	getrusage(RUSAGE_SELF, &before);
	while (left > 0) {
		long pages = left < piece ? left : piece;
		char *memory = mmap(NULL, pages * page, PROT_READ | PROT_WRITE,
				    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (memory == MAP_FAILED)
			fail("mmap: %s", strerror(errno));
		/* A huge page would take one fault for 512 pages. */
		madvise(memory, pages * page, MADV_NOHUGEPAGE);
		for (long i = 0; i < pages; i++)
			*(volatile char *)(memory + i * page) = 1;
		munmap(memory, pages * page);
		left -= pages;
	}
	getrusage(RUSAGE_SELF, &after);
	long taken = after.ru_minflt - before.ru_minflt;
	if (taken < count)
		fail("%ld faults were taken where %ld were wanted", taken, count);
	return count;
}

static long spin(void)
{
	long end = milliseconds() + 1000 * number(0), count = 0;
	do {
		for (volatile int i = 0; i < 10000; i++)
			;
		count++;
	} while (milliseconds() < end);
	return count;
}

static long idle(void)
{
	sleep(number(0));
	return 1;
}

static long pipe_read(void)
{
	int ends[2];
	char c;
	if (pipe(ends) < 0)
		fail("pipe: %s", strerror(errno));
	/* This process holds the other end, so there is never an end to read either. */
	if (read(ends[0], &c, 1) < 0)
		fail("read: %s", strerror(errno));
	return 1;
}

static int sleep_forever(void *unused)
{
	(void)unused;
	while (poll(NULL, 0, -1) == 0 || errno == EINTR)
		;
	return 1;
}

static long threads(void)
{
	const size_t size = 64 << 10;
	long count = number(0);
	for (long i = 0; i < count; i++) {
		char *stack = mmap(NULL, size, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (stack == MAP_FAILED)
			fail("mmap: %s", strerror(errno));
		int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD |
			    CLONE_SYSVSEM;
		if (clone(sleep_forever, stack + size, flags, NULL) < 0)
			fail("clone: %s", strerror(errno));
	}
	return sleep_forever(NULL);
}

static long scribble(void)
{
	off_t address = strtoll(argument(0), NULL, 0);
	size_t words = strtoll(argument(1), NULL, 0) / sizeof(unsigned long);
	long end = milliseconds() + 1000 * number(2), count = 0;
	int file = open("/dev/mem", O_RDWR);
	if (file < 0)
		fail("open /dev/mem: %s", strerror(errno));
	volatile unsigned long *memory = mmap(NULL, words * sizeof *memory, PROT_READ | PROT_WRITE,
					      MAP_SHARED, file, address);
	if (memory == MAP_FAILED)
		fail("mmap /dev/mem: %s", strerror(errno));
	/* A linear congruential sequence (Knuth's MMIX); its high bits are the random ones. */
	unsigned long random = 1;
	do {
		for (int i = 0; i < 10000; i++, count++) {
			random = random * 6364136223846793005UL + 1442695040888963407UL;
			/* Every fourth word goes to the ring headers, where it hurts most. */
			size_t at = (random >> 33) % (i % 4 ? words : words < 1024 ? words : 1024);
			memory[at] = random ^ random >> 29;
		}
	} while (milliseconds() < end);
	return count;
}

/* Makes the file that others wait for, if one is named. */
static long announce(void)
{
	int file = argument_count ? creat(argument(0), 0600) : 0;
	if (file < 0)
		fail("%s: %s", argument(0), strerror(errno));
	return 1;
}

static long wait_console_line(void)
{
	char c;
	ssize_t got;
	say("VMM-READY\n");
	while ((got = read(STDIN_FILENO, &c, 1)) == 1)
		if (c == '\n' || c == '\r')
			return announce();
	fail("the console ended before a line came");
	return 0;
}

static long exec(void)
{
	const char *path = argument(0);
	pid_t child = fork();
	if (child == 0) {
		execl("/bin/sh", "sh", path, (char *)NULL);
		_exit(127);
	}
	int status;
	if (child < 0 || waitpid(child, &status, 0) != child)
		fail("%s", strerror(errno));
	if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
		fail("ended with wait status %#x", status);
	return 1;
}

static long shell(void)
{
	char line[4096];
	long count = 0;
	struct termios terminal;
	/* What comes in is not to be among what goes out. */
	if (tcgetattr(STDIN_FILENO, &terminal) == 0) {
		terminal.c_lflag &= ~ECHO;
		tcsetattr(STDIN_FILENO, TCSANOW, &terminal);
	}
	say("VMM-READY\n");
	while (fgets(line, sizeof line, stdin)) {
		line[strcspn(line, "\r\n")] = 0;
		if (strcmp(line, "exit") == 0)
			return count;
		pid_t child = fork();
		if (child == 0) {
			execl("/bin/sh", "sh", "-c", line, (char *)NULL);
			_exit(127);
		}
		int status;
		if (child < 0 || waitpid(child, &status, 0) != child)
			fail("%s", strerror(errno));
		say("VMM-SHELL-END %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : 128);
		count++;
	}
	fail("standard input ended without \"exit\"");
	return 0;
}

enum kind { OLD, NEW, WRONG, NONE };

static long answers[3], switches;
static enum kind last = NONE;

static void count(enum kind kind)
{
	answers[kind]++;
	switches += last != NONE && last != kind;
	last = kind;
}

static long say_answers(void)
{
	say("VMM-ANSWERS %s old=%ld new=%ld wrong=%ld switches=%ld\n", item, answers[OLD], answers[NEW],
	    answers[WRONG], switches);
	return answers[OLD] + answers[NEW] + answers[WRONG];
}

static long lseeks(void)
{
	long count = number(0);
	int file = open("/dev/null", O_RDONLY);
	if (file < 0)
		fail("open /dev/null: %s", strerror(errno));
	long begin = nanoseconds();
	for (long i = 0; i < count; i++)
		lseek(file, i, SEEK_SET);
	say("VMM-LSEEKS ns=%ld\n", nanoseconds() - begin);
	return count;
}

static long put(void)
{
	char line[256];
	int length = snprintf(line, sizeof line, "%s\n", argument(1));
	int file = open(argument(0), O_WRONLY);
	if (file < 0)
		fail("open: %s", strerror(errno));
	long begin = nanoseconds();
	if (write(file, line, length) != length)
		fail("write: %s", strerror(errno));
	say("VMM-PUT %s ns=%ld\n", argument(0), nanoseconds() - begin);
	return 1;
}

static long gap(void)
{
	const char *end = argument(0);
	long longest = 0, looks = 0;
	while (!exists(end)) {
		/* Whatever looking for the file takes is no gap. */
		long before = nanoseconds();
		for (int i = 0; i < 100000; i++, looks++) {
			long now = nanoseconds();
			if (now - before > longest)
				longest = now - before;
			before = now;
		}
	}
	say("VMM-GAP ns=%ld\n", longest);
	return looks;
}

static long null_lseek(void)
{
	const char *end = argument(0);
	int file = open("/dev/null", O_RDONLY);
	if (file < 0)
		fail("open /dev/null: %s", strerror(errno));
	for (off_t offset = 1; offset % 1000 != 0 || !exists(end); offset++) {
		off_t answer = lseek(file, offset, SEEK_SET);
		count(answer == 0 ? OLD : answer == offset ? NEW : WRONG);
	}
	return say_answers();
}

/* What samples/livepatch/shared-state.c adds to load averages and to the number of running tasks. */
#define MARK 1000

static enum kind loadavg_kind(const char *text)
{
	unsigned long reading, load;
	unsigned running;
	double loads[3];
	if (sscanf(text, "patched: reading %lu, load %lu.00, %u running", &reading, &load, &running) == 3)
		return load > MARK && running > MARK ? NEW : WRONG;
	if (sscanf(text, "%lf %lf %lf %u/", &loads[0], &loads[1], &loads[2], &running) != 4)
		return WRONG;
	return loads[0] < MARK && loads[1] < MARK && loads[2] < MARK && running < MARK ? OLD : WRONG;
}

static long loadavg(void)
{
	const char *end = argument(0);
	int file = open("/proc/loadavg", O_RDONLY);
	if (file < 0)
		fail("open /proc/loadavg: %s", strerror(errno));
	for (long i = 1; i % 100 != 0 || !exists(end); i++) {
		char text[256];
		ssize_t got = pread(file, text, sizeof text - 1, 0);
		if (got < 0)
			fail("read /proc/loadavg: %s", strerror(errno));
		text[got] = 0;
		enum kind kind = loadavg_kind(text);
		if (kind == WRONG)
			say("VMM-WRONG %s", text);
		count(kind);
		struct sysinfo info;
		if (sysinfo(&info) < 0)
			fail("sysinfo: %s", strerror(errno));
		count(info.loads[0] >> SI_LOAD_SHIFT >= MARK ? NEW : OLD);
	}
	return say_answers();
}

static long pipe_until(void)
{
	const char *end = argument(0);
	int ends[2];
	if (pipe(ends) < 0)
		fail("pipe: %s", strerror(errno));
	pid_t child = fork();
	if (child == 0) {
		while (!exists(end))
			usleep(10000);
		_exit(write(ends[1], "", 1) != 1);
	}
	char byte;
	ssize_t got = read(ends[0], &byte, 1);
	if (got < 0)
		fail("read: %s", strerror(errno));
	int status;
	if (child < 0 || waitpid(child, &status, 0) != child)
		fail("%s", strerror(errno));
	return got;
}

static const struct {
	const char *name;
	long (*run)(void);
} works[] = {
	{ "proc-read", proc_read }, { "syscalls", syscalls },
	{ "forks", forks },	    { "faults", faults },
	{ "spin", spin },	    { "idle", idle },
	{ "scribble", scribble },   { "delay", idle },	    { "wait-console-line", wait_console_line },
	{ "pipe", pipe_read },	    { "threads", threads },
	{ "exec", exec },	    { "shell", shell },
	{ "lseeks", lseeks },	    { "put", put },	    { "gap", gap },
	{ "null-lseek", null_lseek }, { "loadavg", loadavg },
	{ "pipe-read", pipe_until },
};

static void pin(const char *cpu)
{
	char *end;
	long number = strtol(cpu, &end, 10);
	if (*cpu == 0 || *end != 0 || number < 0 || number >= CPU_SETSIZE)
		fail("\"%s\" is not a CPU", cpu);
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(number, &set);
	if (sched_setaffinity(0, sizeof set, &set) < 0)
		fail("CPU %ld: %s", number, strerror(errno));
}

/* Runs one item in this process and ends it. */
static void run(char *text)
{
	item = strdup(text);
	char *cpu = strchr(text, '@');
	if (cpu)
		*cpu++ = 0;
	char *rest = text, *name = strsep(&rest, ":");
	while (rest && argument_count < 8)
		arguments[argument_count++] = strsep(&rest, ":");
	if (cpu)
		pin(cpu);
	for (unsigned i = 0; i < sizeof works / sizeof *works; i++) {
		if (strcmp(works[i].name, name) != 0)
			continue;
		prctl(PR_SET_NAME, name);
		say("VMM-WORK-BEGIN %s\n", item);
		long begin = milliseconds();
		long count = works[i].run();
		say("VMM-WORK-END %s count=%ld ms=%ld\n", item, count, milliseconds() - begin);
		exit(0);
	}
	fail("there is no such work");
}

int main(int count, char **words)
{
	if (count != 2) {
		fprintf(stderr, "usage: work LIST\n");
		return 2;
	}
	int failed = 0;
	char *groups = words[1], *group;
	while ((group = strsep(&groups, ","))) {
		pid_t children[MAX_GROUP];
		int running = 0;
		char *text;
		while ((text = strsep(&group, "+"))) {
			if (*text == 0)
				continue;
			if (running == MAX_GROUP) {
				fprintf(stderr, "work: more than %d items in a group\n", MAX_GROUP);
				return 2;
			}
			pid_t child = fork();
			if (child < 0) {
				perror("work: fork");
				return 1;
			}
			if (child == 0)
				run(text);
			children[running++] = child;
		}
		for (int i = 0; i < running; i++) {
			int status;
			if (waitpid(children[i], &status, 0) < 0 || status != 0)
				failed = 1;
		}
	}
	return failed;
}
