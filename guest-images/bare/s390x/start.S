/*
 * An s390x machine without an operating system: two processors, each with a lowcore of its own, no
 * address translation.
 */

#include "../task.h"

#define LOWCORE1	0x10000
#define STACK0		0x1e000
#define STACK1		0x1f000

/* In a lowcore: what Linux has there, and ours from 0x1000 on. */
#define LC_FTRACE_316	0x388
#define LC_FTRACE_318	0x390
#define LC_PID		0x39c
#define LC_CPU_NR	0x3a0
#define LC_COUNT	0x3a8
#define LC_BODY		0x1000
#define LC_AFTER	0x1080
#define LC_SAVED	0x1100
#define LC_BODIES	0x1180
#define LC_TRACES	0x1188
#define LC_CALL		0x1190
#define LC_MASK		0x1198

	.section .lowcore, "aw"
	.org	0x1a0			# restart new PSW: how processor 1 begins
	.quad	0x0000000180000000, start1
	.org	0x1d0			# program new PSW
	.quad	0x0000000180000000, program_check
	.org	LC_FTRACE_316
	.quad	_mcount, ftrace_caller
	.org	LC_PID
	.long	FIRST_PID
	.org	LC_CPU_NR
	.long	0
	.org	LC_COUNT
	.long	FIRST_COUNT
	.org	0x2000

	.text
	.globl	start, call_checked, bodies, traces, body, _mcount, __fentry__
	.globl	ftrace_caller, ftrace_caller_block
start:
	lgfi	%r2,LOWCORE1		# the second lowcore is a copy of the first
	lghi	%r3,0x2000
	lghi	%r4,0
	lghi	%r5,0x2000
	mvcl	%r2,%r4
	lgfi	%r2,LOWCORE1
	lhi	%r3,1
	st	%r3,LC_CPU_NR(%r2)
	lhi	%r3,FIRST_PID + 1
	st	%r3,LC_PID(%r2)
	iilf	%r3,SECOND_COUNT
	st	%r3,LC_COUNT(%r2)
	lhi	%r3,1
	sigp	%r0,%r3,6		# restart
	lgfi	%r15,STACK0
	lghi	%r2,0
	brasl	%r14,run
start1:
	larl	%r2,lowcore1_at
	spx	0(%r2)
	lgfi	%r15,STACK1
	lay	%r1,LC_MASK
	stosm	0(%r1),2		# no interrupt comes, as no channel is let through
	lghi	%r2,1
	brasl	%r14,run

	.balign	8
lowcore1_at:
	.long	LOWCORE1

/* void call_checked(u64 function, struct call *call) */
call_checked:
	stmg	%r6,%r15,48(%r15)
	aghi	%r15,-(160 + 64)
	stg	%r3,LC_CALL
	mvc	160(64,%r15),3*14*8(%r3)
	larl	%r1,returned
	stg	%r15,12*8(%r3)
	stg	%r1,13*8(%r3)
	lgr	%r1,%r2
	lmg	%r2,%r13,0(%r3)
	basr	%r14,%r1
returned:
	stmg	%r0,%r15,LC_AFTER
	lg	%r3,LC_CALL
	lghi	%r1,LC_BODY
	mvc	14*8(12*8,%r3),16(%r1)		# r2 to r13
	mvc	14*8+12*8(8,%r3),15*8(%r1)	# r15
	mvc	14*8+13*8(8,%r3),14*8(%r1)	# r14
	lghi	%r1,LC_AFTER
	mvc	2*14*8(12*8,%r3),16(%r1)
	mvc	2*14*8+12*8(8,%r3),15*8(%r1)
	mvc	2*14*8+13*8(8,%r3),14*8(%r1)
	lg	%r15,12*8(%r3)
	mvc	3*14*8+64(64,%r3),160(%r15)
	lmg	%r6,%r15,48+160+64(%r15)
	br	%r14

/* What every function does. */
body:
	stmg	%r0,%r15,LC_BODY
	agsi	LC_BODIES,1
	br	%r14

bodies:
	lg	%r2,LC_BODIES
	br	%r14

traces:
	lg	%r2,LC_TRACES
	br	%r14

/* The guest's own tracing, as it is entered with the return address in r14, or in r0. */
_mcount:
	agsi	LC_TRACES,1
	br	%r14
__fentry__:
	agsi	LC_TRACES,1
	lgr	%r1,%r0
	br	%r1
ftrace_caller:
	agsi	LC_TRACES,1
	lgr	%r1,%r0
	br	%r1
ftrace_caller_block:
	agsi	LC_TRACES,1
	lgr	%r1,%r0
	b	18(%r1)

/* A breakpoint, as a probe sets it: counted, and the instruction below it done. */
program_check:
	stmg	%r0,%r15,LC_SAVED
	llgf	%r5,LC_CPU_NR
	lg	%r3,0x158		# old PSW: behind the breakpoint
	llgh	%r2,0x8e
	chi	%r2,1			# operation
	jne	0f
	larl	%r1,store_rest
	clc	0(4,%r3),0(%r1)
	je	1f
	clc	0(4,%r3),4(%r1)
	je	2f
0:	lgr	%r4,%r3
	lgr	%r3,%r2
	lgr	%r2,%r5
	brasl	%r14,trapped
1:	stg	%r14,8(%r15)
	j	3f
2:	la	%r1,22(%r3)
	stg	%r1,LC_SAVED
3:	la	%r3,4(%r3)
	stg	%r3,0x158
	sllg	%r5,%r5,6		# sizeof(struct cpu)
	larl	%r1,shared+64+6*8
	agr	%r1,%r5
	agsi	0(%r1),1
	lmg	%r0,%r15,LC_SAVED
	lpswe	0x150
	.balign	8
store_rest:
	.byte	0xf0, 0x08, 0x00, 0x24	# of stg %r14,8(%r15)
	.long	12			# of larl %r0,.+24
