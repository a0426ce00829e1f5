/*
 * What the lists of pads of all architectures have in common. Each says how its functions are aligned
 * (ALIGN, in bytes) before it includes this.
 */

	/* A function, where its pad's changeable instruction is, and how often a call of it enters the
	 * guest's own tracing. */
	.macro	entry name, offset, traced
	.pushsection .rodata.pads, "a"
	.quad	\name, \name + \offset, \traced
	.popsection
	.endm

	.macro	function name, offset, traced
	.globl	\name
	.type	\name, @function
	.balign	ALIGN
\name:
	entry	\name, \offset, \traced
	.endm

	.section .rodata.pads, "a"
	.balign	8
	.globl	pads
pads:
	.text
