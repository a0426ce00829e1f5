/*
 * Replaces three functions that share a variable which is new with them.
 *
 * /proc/loadavg counts how often it was read. loadavg_proc_show, which shows it, calls the other two:
 *
 *	$ cat /proc/loadavg
 *	patched: reading 1, load 1001.00, 1001 running
 *
 * The load averages are those of get_avenrun, which sysinfo(2) shows as well, and the number of
 * running tasks is that of nr_running, which is also in /proc/stat.
 *
 * A reader that was in the old loadavg_proc_show while all three were replaced would show what never
 * was: the old words with the new numbers. So nobody may be in there then, which is looked after for
 * every payload that replaces more than one function.
 */
#include "vmm-livepatch.h"

struct seq_file;

/* Load averages have so many bits behind their point (FSHIFT of include/linux/sched/loadavg.h). */
#define FSHIFT 11

/* What no load average and no number of running tasks is by itself. */
#define MARK 1000

/* fs/seq_file.c */
void seq_printf(struct seq_file *m, const char *format, ...);

/* fs/proc/loadavg.c, kernel/sched/loadavg.c, kernel/sched/core.c */
int loadavg_proc_show(struct seq_file *m, void *v);
void get_avenrun(unsigned long *loads, unsigned long offset, int shift);
unsigned int nr_running(void);

/* How often it was read. */
static unsigned long readings;

int loadavg_proc_show(struct seq_file *m, void *v)
{
	unsigned long reading = __atomic_add_fetch(&readings, 1, __ATOMIC_RELAXED);
	unsigned long loads[3];

	(void)v;
	get_avenrun(loads, 0, 0);
	seq_printf(m, "patched: reading %lu, load %lu.00, %u running\n", reading,
		   loads[0] >> FSHIFT, nr_running());
	return 0;
}

void get_avenrun(unsigned long *loads, unsigned long offset, int shift)
{
	unsigned long load = MARK + __atomic_load_n(&readings, __ATOMIC_RELAXED);

	for (int i = 0; i < 3; i++)
		loads[i] = ((load << FSHIFT) + offset) << shift;
}

unsigned int nr_running(void)
{
	return MARK + (unsigned int)__atomic_load_n(&readings, __ATOMIC_RELAXED);
}
