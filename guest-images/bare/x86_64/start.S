/*
 * An x86_64 machine without an operating system: two processors that begin at once at the first byte,
 * in 64-bit mode, with their numbers in rdi (under QEMU by way of boot.S). The page tables map RAM
 * where it is, under QEMU with the region in it. Our own virtual machine monitor has the region at
 * 4 GiB; it is mapped at 1 GiB, where the displacements of its code reach.
 */

#include "../task.h"

#define MSR_GS_BASE	0xc0000101

/* In what gs points to. */
#define PC_CPU		0
#define PC_CALL		8
#define PC_TARGET	16
#define PC_BODIES	24
#define PC_TRACES	32
#define PC_TASK		40		/* the address of the task, which is here too */
#define PC_PID		48
#define PC_COUNT	52
#define PC_BODY		256
#define PC_AFTER	512
#define PC_SIZE		4096

	.macro	store base
	mov	%rax,%gs:\base
	mov	%rbx,%gs:\base+8
	mov	%rcx,%gs:\base+16
	mov	%rdx,%gs:\base+24
	mov	%rsi,%gs:\base+32
	mov	%rdi,%gs:\base+40
	mov	%rbp,%gs:\base+48
	mov	%r8,%gs:\base+56
	mov	%r9,%gs:\base+64
	mov	%r10,%gs:\base+72
	mov	%r11,%gs:\base+80
	mov	%r12,%gs:\base+88
	mov	%r13,%gs:\base+96
	mov	%r14,%gs:\base+104
	mov	%r15,%gs:\base+112
	.endm

	.section .start, "ax"
	.globl	pml4, start, cpu_number, call_checked, bodies, traces, body, __fentry__, ftrace_caller
	.globl	current_task, task_pid, preempt_count
	.set	cpu_number, PC_CPU
	.set	current_task, PC_TASK
	.set	task_pid, PC_PID
	.set	preempt_count, PC_COUNT
start:
	mov	$pml4,%eax
	mov	%rax,%cr3
	mov	%edi,%ebx
	imul	$PC_SIZE,%ebx,%ebp
	lea	stacks+PC_SIZE(%rbp),%rsp
	lea	areas(%rbp),%rax
	xor	%edx,%edx
	mov	$MSR_GS_BASE,%ecx
	wrmsr
	mov	%ebx,%gs:PC_CPU
	lea	areas(%rbp),%rax
	mov	%rax,%gs:PC_TASK
	lea	FIRST_PID(%rbx),%eax
	mov	%eax,%gs:PC_PID
	mov	counts(,%rbx,4),%eax
	mov	%eax,%gs:PC_COUNT

	imul	$512,%ebx,%ebp		# an interrupt table of its own: nobody waits for anybody
	lea	idts(%rbp),%rdi
	mov	%rdi,%gs:PC_BODY+2
	movw	$511,%gs:PC_BODY
	mov	$stubs,%eax
	mov	%cs,%ecx
0:	mov	%ax,(%rdi)
	mov	%cx,2(%rdi)
	movw	$0x8e00,4(%rdi)
	mov	%eax,%edx
	shr	$16,%edx
	mov	%dx,6(%rdi)
	movq	$0,8(%rdi)
	add	$16,%rdi
	add	$16,%eax
	cmp	$stubs_end,%eax
	jb	0b
	lidt	%gs:PC_BODY
	mov	%ebx,%edi
	call	run

	.text
/* void call_checked(u64 function, struct call *call) */
call_checked:
	push	%rbx
	push	%rbp
	push	%r12
	push	%r13
	push	%r14
	push	%r15
	mov	%rdi,%gs:PC_TARGET
	mov	%rsi,%gs:PC_CALL
	sub	$64,%rsp
	mov	$7,%ecx
0:	mov	3*18*8(%rsi,%rcx,8),%rax
	mov	%rax,(%rsp,%rcx,8)
	dec	%ecx
	jns	0b
	lea	-8(%rsp),%rax
	mov	%rax,16*8(%rsi)
	movq	$returned,17*8(%rsi)
	push	15*8(%rsi)
	popfq
	mov	(%rsi),%rax
	mov	8(%rsi),%rbx
	mov	16(%rsi),%rcx
	mov	24(%rsi),%rdx
	mov	40(%rsi),%rdi
	mov	48(%rsi),%rbp
	mov	56(%rsi),%r8
	mov	64(%rsi),%r9
	mov	72(%rsi),%r10
	mov	80(%rsi),%r11
	mov	88(%rsi),%r12
	mov	96(%rsi),%r13
	mov	104(%rsi),%r14
	mov	112(%rsi),%r15
	mov	32(%rsi),%rsi
	call	*%gs:PC_TARGET
returned:
	store	PC_AFTER
	mov	-8(%rsp),%rax
	mov	%rax,%gs:PC_AFTER+17*8
	lea	-8(%rsp),%rax
	mov	%rax,%gs:PC_AFTER+16*8
	pushfq
	pop	%gs:PC_AFTER+15*8
	mov	%gs:PC_CALL,%rsi
	mov	$17,%ecx
0:	mov	%gs:PC_BODY(,%rcx,8),%rax
	mov	%rax,18*8(%rsi,%rcx,8)
	mov	%gs:PC_AFTER(,%rcx,8),%rax
	mov	%rax,2*18*8(%rsi,%rcx,8)
	dec	%ecx
	jns	0b
	mov	16*8(%rsi),%rsp		# as it was, whatever it is
	add	$8,%rsp
	mov	$7,%ecx
0:	mov	(%rsp,%rcx,8),%rax
	mov	%rax,3*18*8+64(%rsi,%rcx,8)
	dec	%ecx
	jns	0b
	add	$64,%rsp
	pop	%r15
	pop	%r14
	pop	%r13
	pop	%r12
	pop	%rbp
	pop	%rbx
	ret

/* What every function does. */
body:
	store	PC_BODY
	mov	%rsp,%gs:PC_BODY+16*8
	mov	(%rsp),%rax
	mov	%rax,%gs:PC_BODY+17*8
	pushfq
	mov	(%rsp),%rax
	mov	%rax,%gs:PC_BODY+15*8
	incq	%gs:PC_BODIES
	popfq
	mov	%gs:PC_BODY,%rax
	ret

bodies:
	mov	%gs:PC_BODIES,%rax
	ret

traces:
	mov	%gs:PC_TRACES,%rax
	ret

/* The guest's own tracing: the compiler's hook, and what the kernel replaces it by. */
__fentry__:
	jmp	ftrace_caller
ftrace_caller:
	pushfq
	incq	%gs:PC_TRACES
	popfq
	ret

/* One stub of 16 bytes a vector: its number, and an error code where the processor pushes none. */
	.balign	16
stubs:
	.set	vector, 0
	.rept	32
	.balign	16
	.if	vector == 3
	jmp	breakpoint
	.else
	.if	!((0x60227d00 >> vector) & 1)
	push	$0
	.endif
	push	$vector
	jmp	fault
	.endif
	.set	vector, vector + 1
	.endr
	.balign	16
stubs_end:

/* A breakpoint on a function's landing pad, as a probe sets it: counted, and the rest of it passed. */
breakpoint:
	push	%rax
	push	%rbx
	mov	16(%rsp),%rax
	mov	-1(%rax),%ebx
	cmp	$0xfa1e0fcc,%ebx
	jne	0f
	addq	$3,16(%rsp)
	mov	%gs:PC_CPU,%eax
	shl	$6,%eax			# sizeof(struct cpu)
	incq	shared+64+6*8(%rax)
	pop	%rbx
	pop	%rax
	iretq
0:	pop	%rbx
	pop	%rax
	push	$0
	push	$3
fault:
	mov	%gs:PC_CPU,%edi
	pop	%rsi
	mov	8(%rsp),%rdx
	call	trapped

	.data
	.balign	4
counts:	.long	FIRST_COUNT, SECOND_COUNT
	.balign	4096
pml4:
	.quad	pdpt + 3
	.skip	4096 - 8
pdpt:
	.quad	ram_pd + 3, region_pd + 3
	.skip	4096 - 16
ram_pd:					# 1 GiB where it is, writable and executable
	.set	page, 0
	.rept	512
	.quad	(page << 21) + 0x83
	.set	page, page + 1
	.endr
region_pd:				# code that can't be written, constants that can't be executed either,
					# data and rings that can't be executed
	.quad	0x100000000 + 0x81, 0x8000000100200081
	.set	page, 2
	.rept	510
	.quad	0x8000000100000083 + (page << 21)
	.set	page, page + 1
	.endr

	.bss
	.balign	4096
areas:	.skip	2 * PC_SIZE
stacks:	.skip	2 * PC_SIZE
idts:	.skip	2 * 512
