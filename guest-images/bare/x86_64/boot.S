/*
 * From QEMU's entry to the place where both processors begin: the way there that our own virtual
 * machine monitor makes itself. QEMU enters where the note says, in 32-bit mode without paging
 * (Xen's PVH boot); the other processor waits to be woken, in real mode.
 */

#define APIC_ICR	0xfee00300
#define ICR_INIT	0x000c4500	/* to all but itself */
#define ICR_STARTUP	0x000c4600
#define WAKE_PAGE	0x8		/* where the other processor begins: 0x8000 */

#define MSR_EFER	0xc0000080
#define EFER_LME_NXE	0x900
#define CR0_PG_WP_PE	0x80010001
#define CR4_PAE		0x20

	.section .note, "a", @note
	.long	4, 4, 18		# XEN_ELFNOTE_PHYS32_ENTRY
	.asciz	"Xen"
	.long	pvh_start

	.text
	.code32
pvh_start:
	lgdt	gdt_pointer
	mov	$woken,%esi
	mov	$WAKE_PAGE << 12,%edi
	mov	$woken_end - woken,%ecx
	cld
	rep movsb
	movl	$ICR_INIT,APIC_ICR
	mov	$1000000,%ecx		# a moment, for real processors
0:	pause
	loop	0b
	movl	$ICR_STARTUP | WAKE_PAGE,APIC_ICR
	xor	%edi,%edi
	jmp	long_mode

	.code16
woken:	cli
	xor	%ax,%ax
	mov	%ax,%ds
	lgdtl	(WAKE_PAGE << 12) + gdt_here - woken
	mov	%cr0,%eax
	or	$1,%al
	mov	%eax,%cr0
	ljmpl	$8,$woken32
gdt_here:
	.short	gdt_end - gdt - 1
	.long	gdt
woken_end:

	.code32
woken32:
	mov	$1,%edi
long_mode:				# with the processor's number in edi
	mov	$24,%eax
	mov	%eax,%ds
	mov	%eax,%es
	mov	%eax,%ss
	mov	$CR4_PAE,%eax
	mov	%eax,%cr4
	mov	$pml4,%eax
	mov	%eax,%cr3
	mov	$MSR_EFER,%ecx
	xor	%edx,%edx
	mov	$EFER_LME_NXE,%eax
	wrmsr
	mov	$CR0_PG_WP_PE,%eax
	mov	%eax,%cr0
	ljmp	$16,$start

	.data
	.balign	8
gdt:	.quad	0, 0x00cf9b000000ffff, 0x00af9b000000ffff, 0x00cf93000000ffff
gdt_end:
gdt_pointer:
	.short	gdt_end - gdt - 1
	.long	gdt
