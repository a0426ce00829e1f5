/*
 * Fixes a return value, in a function that can be called millions of times a second.
 *
 * lseek(2) is to return the offset that the file has afterwards. That of /dev/null returns 0 whatever
 * it is asked for:
 *
 *	lseek(null, 1234, SEEK_SET) == 0	before
 *	lseek(null, 1234, SEEK_SET) == 1234	with this payload
 *
 * It replaces one function, which keeps nothing, so it does not matter who is inside the old one while
 * it is applied: every call answers as the old one or as the new one.
 */
#include "vmm-livepatch.h"

struct file;

#define SEEK_SET 0

/* drivers/char/mem.c */
long long null_lseek(struct file *file, long long offset, int whence);

long long null_lseek(struct file *file, long long offset, int whence)
{
	(void)file;
	return whence == SEEK_SET ? offset : 0;
}
