/*
 * Functions with every pad that s390x kernels have had, in every state. Those that gcc 12 makes come
 * from compiled.c.
 */

#define STG	.byte 0xe3, 0xe0, 0xf0, 0x08, 0x00, 0x24	/* stg %r14,8(%r15) */
#define LG	.byte 0xe3, 0xe0, 0xf0, 0x08, 0x00, 0x04	/* lg %r14,8(%r15) */

#define ALIGN	8
#include "../pads.h"

	.macro	done name
	jg	body
	.size	\name, . - \name
	.endm

	/* A slot of hotpatch trampolines. */
	.macro	slot name, of
	.balign	8
\name:
	brasl	%r1,slot_shared
	.short	0
	.quad	\of + 6, ftrace_caller
	.endm

	function block_316, 6, 0
	STG
	.byte	0xc0, 0xf4, 0, 0, 0, 9		# jg .+18
	lgr	%r0,%r0
	basr	%r14,%r1
	LG
	done	block_316

	function block_316_traced, 6, 1
	STG
	lg	%r1,0x388
	lgr	%r0,%r0
	basr	%r14,%r1
	LG
	done	block_316_traced

	function block_318, 6, 0
	.byte	0xc0, 0x00, 0, 0, 0, 12		# larl %r0,.+24
	.byte	0xc0, 0xf4, 0, 0, 0, 9		# jg .+18
	br	%r1
	.byte	0xc0, 0x04, 0, 0, 0, 0		# brcl 0,.
	.byte	0xa7, 0x04, 0, 0		# brc 0,.
	done	block_318

	function block_318_traced, 6, 1
	.byte	0xc0, 0x00, 0, 0, 0, 12
	lg	%r1,0x390
	br	%r1
	.byte	0xc0, 0x04, 0, 0, 0, 0
	.byte	0xa7, 0x04, 0, 0
	done	block_318_traced

	function block_319, 0, 0
	.byte	0xc0, 0xf4, 0, 0, 0, 12		# jg .+24
	larl	%r1,counter
	brasl	%r14,_mcount
	LG
	done	block_319

	function block_319_traced, 0, 1
	brasl	%r0,ftrace_caller_block
	larl	%r1,counter
	brasl	%r14,_mcount
	LG
	done	block_319_traced

	function block_compiled, 0, 1
	STG
	larl	%r1,counter
	brasl	%r14,_mcount
	LG
	done	block_compiled

	function block_compiled_316, 6, 1
	STG
	larl	%r1,counter
	brasl	%r14,_mcount
	LG
	done	block_compiled_316

	function slot_idle, 0, 0
	.byte	0xc0, 0x04
	.long	(slot_of_idle - slot_idle) / 2
	done	slot_idle

	function slot_traced, 0, 1
	.byte	0xc0, 0xf4
	.long	(slot_of_traced - slot_traced) / 2
	done	slot_traced

	function slot_foreign, 0, 0		# leads behind another function's pad
	.byte	0xc0, 0x04
	.long	(slot_of_idle - slot_foreign) / 2
	done	slot_foreign

	function plain_traced, 0, 1
	brasl	%r0,ftrace_caller
	done	plain_traced

	function no_pad, 0, 0
	lgr	%r1,%r0
	nopr	0
	done	no_pad

	entry	fentry_nop, 0, 0
	entry	fentry, 0, 1
	entry	mcount, 0, 1
	entry	mcount_nop, 0, 0
	entry	hotpatch_0_3, 0, 0
	entry	hotpatch_0_12, 0, 0
	entry	hotpatch_3_3, 0, 0
	entry	hotpatch_0_2, 0, 0
	entry	patchable_3, 0, 0

	.section .rodata.pads, "a"
	.globl	pads_end
pads_end:
	.text

slot_shared:
	.byte	0xeb, 0x01, 0x10, 0x02, 0x00, 0x04	# lmg %r0,%r1,2(%r1)
	br	%r1
	slot	slot_of_idle, slot_idle
	slot	slot_of_traced, slot_traced

	.data
	.balign	8
counter:
	.quad	0
