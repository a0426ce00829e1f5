/* Every read from a pipe finds it at its end, once nobody is inside the kernel's own pipe_read. */
#include "vmm-livepatch.h"

struct kiocb;
struct iov_iter;

VMM_CONSISTENT;

long pipe_read(struct kiocb *request, struct iov_iter *to);

long pipe_read(struct kiocb *request, struct iov_iter *to)
{
	(void)request;
	(void)to;
	return 0;
}
