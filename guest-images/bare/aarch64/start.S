/*
 * An aarch64 machine without an operating system: two processors with the MMU off. Each one's area is
 * where TPIDR_EL1 points, as Linux has its per-CPU variables.
 */

#include "../task.h"

#define PC_CPU		0
#define PC_CALL		8
#define PC_TARGET	16
#define PC_BODIES	24
#define PC_TRACES	32
#define PC_PID		40
#define PC_COUNT	48		/* in its upper half 0 if the task is to leave the processor */
#define PC_BODY		256
#define PC_AFTER	512
#define PC_SIZE		4096

	/* Stores all registers in the order of bare.h into this processor's area. x9 and x16 go. */
	.macro	store base
	mrs	x16,tpidr_el1
	add	x16,x16,#\base
	stp	x0,x1,[x16]
	stp	x2,x3,[x16,#16]
	stp	x4,x5,[x16,#32]
	stp	x6,x7,[x16,#48]
	stp	x8,x10,[x16,#64]
	stp	x11,x12,[x16,#80]
	stp	x13,x14,[x16,#96]
	stp	x15,x18,[x16,#112]
	stp	x19,x20,[x16,#128]
	stp	x21,x22,[x16,#144]
	stp	x23,x24,[x16,#160]
	stp	x25,x26,[x16,#176]
	stp	x27,x28,[x16,#192]
	mrs	x9,nzcv
	stp	x29,x9,[x16,#208]
	mov	x9,sp
	stp	x9,x30,[x16,#224]
	.endm

	/* Counts a word of this processor's area. x16 and x17 go. */
	.macro	count field
	mrs	x16,tpidr_el1
	ldr	x17,[x16,#\field]
	add	x17,x17,#1
	str	x17,[x16,#\field]
	.endm

	.text
	.globl	start, cpu_number, call_checked, bodies, traces, body, _mcount, ftrace_caller
	.globl	task_pid, preempt_count
	.set	cpu_number, PC_CPU
	.set	task_pid, PC_PID
	.set	preempt_count, PC_COUNT
start:
	mov	x19,#0
	ldr	x0,=0xc4000003		// PSCI CPU_ON
	mov	x1,#1
	adr	x2,start1
	mov	x3,#0
	hvc	#0
	b	0f
start1:
	mov	x19,#1
0:	adrp	x0,vectors
	add	x0,x0,:lo12:vectors
	msr	vbar_el1,x0
	mov	x1,#PC_SIZE
	adrp	x0,areas
	add	x0,x0,:lo12:areas
	madd	x0,x19,x1,x0
	msr	tpidr_el1,x0
	msr	sp_el0,x0		// where Linux has the current task, and its CPU's number
	str	w19,[x0,#PC_CPU]
	add	w2,w19,#FIRST_PID
	str	w2,[x0,#PC_PID]
	ldr	w2,=(FIRST_COUNT & 0x7fffffff)
	mov	w3,#(FIRST_COUNT >> 31)
	cbz	w19,1f
	ldr	w2,=SECOND_COUNT
	mov	w3,#(SECOND_COUNT >> 31)
	msr	daifclr,#2		// no interrupt comes, as no device makes one
1:	stp	w2,w3,[x0,#PC_COUNT]
	adrp	x0,stacks
	add	x0,x0,:lo12:stacks
	add	x0,x0,#PC_SIZE
	madd	x0,x19,x1,x0
	mov	sp,x0
	isb
	mov	w0,w19
	bl	run

/* void call_checked(u64 function, struct call *call) */
call_checked:
	stp	x29,x30,[sp,#-96]!
	stp	x19,x20,[sp,#16]
	stp	x21,x22,[sp,#32]
	stp	x23,x24,[sp,#48]
	stp	x25,x26,[sp,#64]
	stp	x27,x28,[sp,#80]
	mrs	x16,tpidr_el1
	str	x1,[x16,#PC_CALL]
	sub	sp,sp,#64
	add	x9,x1,#3*240
	.irp	at, 0, 16, 32, 48
	ldp	x2,x3,[x9,#\at]
	stp	x2,x3,[sp,#\at]
	.endr
	mov	x9,sp
	adr	x2,returned
	stp	x9,x2,[x1,#224]
	mov	x17,x0
	mov	x16,x1
	ldp	x29,x9,[x16,#208]
	msr	nzcv,x9
	ldp	x0,x1,[x16]
	ldp	x2,x3,[x16,#16]
	ldp	x4,x5,[x16,#32]
	ldp	x6,x7,[x16,#48]
	ldp	x8,x10,[x16,#64]
	ldp	x11,x12,[x16,#80]
	ldp	x13,x14,[x16,#96]
	ldp	x15,x18,[x16,#112]
	ldp	x19,x20,[x16,#128]
	ldp	x21,x22,[x16,#144]
	ldp	x23,x24,[x16,#160]
	ldp	x25,x26,[x16,#176]
	ldp	x27,x28,[x16,#192]
	blr	x17
returned:
	store	PC_AFTER
	mrs	x16,tpidr_el1
	ldr	x1,[x16,#PC_CALL]
	ldr	x9,[x1,#224]
	mov	sp,x9			// as it was, whatever it is
	add	x2,x16,#PC_BODY
	add	x3,x16,#PC_AFTER
	mov	x4,#0
0:	ldr	x5,[x2,x4]
	add	x6,x1,#240
	str	x5,[x6,x4]
	ldr	x5,[x3,x4]
	add	x6,x6,#240
	str	x5,[x6,x4]
	add	x4,x4,#8
	cmp	x4,#240
	b.ne	0b
	add	x9,x1,#3*240+64
	.irp	at, 0, 16, 32, 48
	ldp	x2,x3,[sp,#\at]
	stp	x2,x3,[x9,#\at]
	.endr
	add	sp,sp,#64
	ldp	x19,x20,[sp,#16]
	ldp	x21,x22,[sp,#32]
	ldp	x23,x24,[sp,#48]
	ldp	x25,x26,[sp,#64]
	ldp	x27,x28,[sp,#80]
	ldp	x29,x30,[sp],#96
	ret

/* What every function does. */
body:
	store	PC_BODY
	count	PC_BODIES
	ret

bodies:
	mrs	x9,tpidr_el1
	ldr	x0,[x9,#PC_BODIES]
	ret

traces:
	mrs	x9,tpidr_el1
	ldr	x0,[x9,#PC_TRACES]
	ret

/* The guest's own tracing: as the compiler's hook, which is given the caller's address in x0 and may
 * change what calls may; and by a pad, with the caller's address in x9. */
_mcount:
	count	PC_TRACES
	ret
ftrace_caller:
	count	PC_TRACES
	mov	x16,x30
	mov	x30,x9
	ret	x16

/* A breakpoint on the first instruction of a pad, as a probe sets it: counted, and the instruction
 * below it, which is mov x9,x30, done. */
	.balign	2048
vectors:
	.rept	4
	.balign	128
	b	fault
	.endr
	.balign	128
	b	synchronous
	.rept	11
	.balign	128
	b	fault
	.endr

synchronous:
	mrs	x16,esr_el1
	lsr	x16,x16,#26
	cmp	x16,#0x3c		// brk: flags are put back by eret
	b.ne	fault
	mrs	x16,elr_el1
	add	x16,x16,#4
	msr	elr_el1,x16
	mov	x9,x30
	mrs	x16,tpidr_el1
	ldr	w17,[x16,#PC_CPU]
	adrp	x16,shared+64+6*8
	add	x16,x16,:lo12:shared+64+6*8
	add	x16,x16,x17,lsl #6	// sizeof(struct cpu)
	ldr	x17,[x16]
	add	x17,x17,#1
	str	x17,[x16]
	eret
fault:
	mrs	x16,tpidr_el1
	ldr	w0,[x16,#PC_CPU]
	mrs	x1,esr_el1
	mrs	x2,elr_el1
	bl	trapped

	.bss
	.balign	4096
areas:	.skip	2 * PC_SIZE
stacks:	.skip	2 * PC_SIZE
