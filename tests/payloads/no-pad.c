/* Replaces a function that no kernel lets be traced. */
unsigned long long sched_clock(void);

unsigned long long sched_clock(void)
{
	return 0;
}
