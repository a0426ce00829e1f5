/*
 * Functions with every pad that x86_64 kernels have had, in every state. Those that gcc makes come
 * from compiled.c.
 */

#define NOP	.byte 0x0f, 0x1f, 0x44, 0x00, 0x00
#define NOP_K8	.byte 0x66, 0x66, 0x66, 0x66, 0x90

#define ALIGN	16
#include "../pads.h"

	.macro	done name
	jmp	body
	.size	\name, . - \name
	.endm

	function nop, 0, 0
	NOP
	done	nop

	function nop_k8, 0, 0
	NOP_K8
	done	nop_k8

	function endbr_nop, 4, 0
	endbr64
	NOP
	done	endbr_nop

	function endbr_nop_k8, 4, 0
	endbr64
	NOP_K8
	done	endbr_nop_k8

	function sealed_nopw, 4, 0
	.byte	0x66, 0x0f, 0x1f, 0x00
	NOP
	done	sealed_nopw

	function sealed_nopl, 4, 0
	.byte	0x0f, 0x1f, 0x40, 0xd6
	NOP
	done	sealed_nopl

	function traced, 0, 1
	call	ftrace_caller
	done	traced

	function endbr_traced, 4, 1
	endbr64
	call	ftrace_caller
	done	endbr_traced

	function jump_traced, 0, 1
	.byte	0xe9
	.long	jump_target - (jump_traced + 5)
	done	jump_traced

	function unknown_prefix, 4, 0
	.byte	0x0f, 0x1f, 0x40, 0x00
	NOP
	done	unknown_prefix

	function no_pad, 0, 0
	nop
	.byte	0x0f, 0x1f, 0x40, 0x00
	done	no_pad

	entry	fentry_nop, 0, 0
	entry	fentry, 0, 1
	entry	fentry_nop_endbr, 4, 0
	entry	fentry_endbr, 4, 1
	entry	fentry_nop_padded, 0, 0
	entry	patchable_5, 0, 0

	.section .rodata.pads, "a"
	.globl	pads_end
pads_end:
	.text

jump_target:
	call	ftrace_caller
	jmp	jump_traced + 5
