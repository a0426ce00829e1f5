/*
 * What every processor of a bare guest does: rounds of calls, as many as the host wants, each of
 * every function in the table of pads, with registers that are known before, looked at in the
 * function's body and looked at afterwards.
 *
 * The host reads and writes `shared` while this runs; tests/src/bare.rs has the same layout.
 */

typedef unsigned long u64;

/* Calls of each function in a round. */
#define CALLS 8

/* A function with a pad, from the assembly. */
struct pad {
	u64 function;
	u64 ip;		/* the instruction of the pad that a tracer changes */
	u64 traced;	/* how often the guest's own tracing is entered by a call */
};

extern const struct pad pads[], pads_end[];

/* Registers in an order that only the assembly knows. The last two are the stack pointer and the
 * address that the function returns to. */
struct call {
	u64 in[REGISTERS];
	u64 body[REGISTERS];
	u64 after[REGISTERS];
	u64 stack[8];	/* copied to the caller's frame and back */
	u64 stack_after[8];
};

/* Calls a function with the registers of `in`. */
void call_checked(u64 function, struct call *call);

/* How often this processor came through a function's body, and through the guest's own tracing. */
u64 bodies(void);
u64 traces(void);

/* What can be wrong with a call, beside registers, which count from 0 (body) and 100 (afterwards). */
enum { WRONG_STACK = 200, WRONG_BODIES, WRONG_TRACES, WRONG_TRAP };

struct cpu {
	u64 rounds;	/* rounds done */
	u64 wrong;	/* checks that failed; what follows is about the first of them */
	u64 function;
	u64 what;
	u64 expected;
	u64 found;
	u64 probes;	/* breakpoints hit */
	u64 stuck;	/* counts while nothing else is done */
};

struct {
	u64 wanted;	/* rounds, written by the host */
	u64 calls;
	u64 only;	/* the one function that is called, written by the host; all if 0 */
	u64 held;	/* the processor, counted from 1, that waits before each call; written by the host */
	u64 returns;	/* whether bodies may find another address to return to; written by the host */
	u64 unused[3];
	struct cpu cpu[2];
} volatile shared = { .calls = CALLS };

static struct call calls[2];

static void compare(int cpu, u64 function, u64 what, u64 expected, u64 found)
{
	volatile struct cpu *mine = &shared.cpu[cpu];

	if (expected == found)
		return;
	if (mine->wrong == 0) {
		mine->function = function;
		mine->what = what;
		mine->expected = expected;
		mine->found = found;
	}
	mine->wrong++;
}

/* Called by the assembly for what no handler of its own knows. */
void trapped(int cpu, u64 code, u64 address)
{
	compare(cpu, address, WRONG_TRAP, ~code, code);
	for (;;)
		shared.cpu[cpu].stuck++;
}

static void call_once(int cpu, const struct pad *pad, u64 *random)
{
	struct call *call = &calls[cpu];
	u64 body = bodies(), traced = traces();

	for (int i = 0; i < REGISTERS - 2; i++)
		call->in[i] = *random = *random * 6364136223846793005 + 1442695040888963407;
	FLAGS(call->in);
	for (int i = 0; i < 8; i++)
		call->stack[i] = ~call->in[i];
	while (shared.held == (u64)cpu + 1)
		shared.cpu[cpu].stuck++;
	call_checked(pad->function, call);
	for (int i = 0; i < REGISTERS; i++) {
		if (i != REGISTERS - 1 || !shared.returns)
			compare(cpu, pad->function, i, call->in[i], call->body[i]);
		compare(cpu, pad->function, 100 + i, call->in[i], call->after[i]);
	}
	for (int i = 0; i < 8; i++)
		compare(cpu, pad->function, WRONG_STACK, call->stack[i], call->stack_after[i]);
	compare(cpu, pad->function, WRONG_BODIES, body + 1, bodies());
	compare(cpu, pad->function, WRONG_TRACES, traced + pad->traced, traces());
}

void run(int cpu)
{
	u64 random = cpu + 1;

	for (;;) {
		while (shared.wanted <= shared.cpu[cpu].rounds)
			PAUSE();
		for (const struct pad *pad = pads; pad != pads_end; pad++) {
			u64 only = shared.only;

			for (int i = 0; i < CALLS && (!only || only == pad->function); i++)
				call_once(cpu, pad, &random);
		}
		shared.cpu[cpu].rounds++;
	}
}
