/* Replaces what samples/livepatch/proc-cmdline.c does, and nothing else. */
#include "vmm-livepatch.h"

struct seq_file;

VMM_REPLACE(other_show, cmdline_proc_show);

void seq_printf(struct seq_file *m, const char *format, ...);
int other_show(struct seq_file *m, void *v);

int other_show(struct seq_file *m, void *v)
{
	(void)v;
	seq_printf(m, "%s\n", "and patched again");
	return 0;
}
