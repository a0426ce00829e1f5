/*
 * Functions with every pad that aarch64 kernels have had, in every state. Those that gcc makes come
 * from compiled.c.
 */

/* `done` aligns what follows it: here that would part a function from the words in front of it. */
#define ALIGN	4
#include "../pads.h"

	.macro	done name
	b	body
	.size	\name, . - \name
	.balign	16
	.endm

	.balign	16

	function prepared, 4, 0
	mov	x9,x30
	nop
	done	prepared

	function prepared_traced, 4, 1
	mov	x9,x30
	bl	ftrace_caller
	done	prepared_traced

	function signed, 4, 0
	mov	x9,x30
	nop
	hint	#25			// paciasp
	hint	#29			// autiasp
	done	signed

	function bti_prepared, 8, 0
	hint	#34			// bti c
	mov	x9,x30
	nop
	done	bti_prepared

	function bti_traced, 8, 1
	hint	#34
	mov	x9,x30
	bl	ftrace_caller
	done	bti_traced

	function paciasp_prepared, 8, 0
	hint	#25
	mov	x9,x30
	nop
	hint	#29
	done	paciasp_prepared

	.quad	ops_literal
	function literal_prepared, 4, 0
	mov	x9,x30
	nop
	done	literal_prepared

	.quad	ops_literal
	function literal_traced, 4, 1
	mov	x9,x30
	bl	ftrace_caller
	done	literal_traced

	function no_pad, 4, 0
	mov	x17,x30
	nop
	done	no_pad

	entry	patchable_2, 4, 0
	entry	patchable_2_bti, 8, 0
	entry	patchable_4_2, 4, 0

	.section .rodata.pads, "a"
	.globl	pads_end
pads_end:

	.data
	.balign	8
ops_literal:
	.quad	0
