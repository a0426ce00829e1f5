/* Is for a kernel that nobody has. */
#include "vmm-livepatch.h"

struct seq_file;

VMM_RELEASE("2.4.*");

int cmdline_proc_show(struct seq_file *m, void *v);

int cmdline_proc_show(struct seq_file *m, void *v)
{
	(void)m;
	(void)v;
	return 0;
}
