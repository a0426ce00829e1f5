/* Needs two functions that no kernel has. */
struct seq_file;

void no_such_function(struct seq_file *m);
void nor_this_one(struct seq_file *m);
int cmdline_proc_show(struct seq_file *m, void *v);

int cmdline_proc_show(struct seq_file *m, void *v)
{
	(void)v;
	no_such_function(m);
	nor_this_one(m);
	return 0;
}
