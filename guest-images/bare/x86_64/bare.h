/* rax, rbx, rcx, rdx, rsi, rdi, rbp, r8 to r15, the arithmetic flags; then rsp and the return address. */
#define REGISTERS 18
#define FLAGS(in) (in)[15] = ((in)[15] & 0x8d5) | 2
#define PAUSE() __asm__ volatile("pause" ::: "memory")
