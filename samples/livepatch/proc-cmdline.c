/*
 * Changes what /proc shows: /proc/cmdline tells of the patch instead of the kernel's parameters.
 *
 *	$ cat /proc/cmdline
 *	this kernel has been patched from outside
 *
 * The simplest payload there is: a function with the name of the one that it replaces, which calls
 * another of the kernel's. What it needs of the kernel it declares itself, as the kernel has it.
 */
#include "vmm-livepatch.h"

struct seq_file;

/* fs/seq_file.c */
void seq_printf(struct seq_file *m, const char *format, ...);

/* fs/proc/cmdline.c */
int cmdline_proc_show(struct seq_file *m, void *v);

int cmdline_proc_show(struct seq_file *m, void *v)
{
	(void)v;
	seq_printf(m, "%s\n", "this kernel has been patched from outside");
	return 0;
}
