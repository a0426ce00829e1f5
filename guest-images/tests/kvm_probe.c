/*
 * Runs a few instructions in a virtual machine of its own, to show that the KVM here works: real
 * mode, an addition, the sum to a port. Prints "KVM-SUM 42" and ends with status 0.
 */
#include <fcntl.h>
#include <linux/kvm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

static int check(int result, const char *what)
{
	if (result < 0) {
		perror(what);
		exit(1);
	}
	return result;
}

int main(void)
{
	/* mov $40,%al; add $2,%al; out %al,$0x10; hlt */
	static const unsigned char code[] = { 0xb0, 40, 0x04, 2, 0xe6, 0x10, 0xf4 };
	int kvm = check(open("/dev/kvm", O_RDWR), "/dev/kvm");
	int vm = check(ioctl(kvm, KVM_CREATE_VM, 0), "KVM_CREATE_VM");
	unsigned char *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE,
				     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	memcpy(memory, code, sizeof code);
	struct kvm_userspace_memory_region region = {
		.guest_phys_addr = 0x1000,
		.memory_size = 4096,
		.userspace_addr = (unsigned long)memory,
	};
	check(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region), "KVM_SET_USER_MEMORY_REGION");
	int vcpu = check(ioctl(vm, KVM_CREATE_VCPU, 0), "KVM_CREATE_VCPU");
	int size = check(ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), "KVM_GET_VCPU_MMAP_SIZE");
	struct kvm_run *run = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	struct kvm_sregs sregs;
	check(ioctl(vcpu, KVM_GET_SREGS, &sregs), "KVM_GET_SREGS");
	sregs.cs.base = sregs.cs.selector = 0;
	check(ioctl(vcpu, KVM_SET_SREGS, &sregs), "KVM_SET_SREGS");
	struct kvm_regs regs = { .rip = 0x1000, .rflags = 2 };
	check(ioctl(vcpu, KVM_SET_REGS, &regs), "KVM_SET_REGS");
	for (;;) {
		check(ioctl(vcpu, KVM_RUN, NULL), "KVM_RUN");
		switch (run->exit_reason) {
		case KVM_EXIT_IO:
			printf("KVM-SUM %d\n", *((unsigned char *)run + run->io.data_offset));
			break;
		case KVM_EXIT_HLT:
			return 0;
		default:
			fprintf(stderr, "unexpected exit %u\n", run->exit_reason);
			return 1;
		}
	}
}
