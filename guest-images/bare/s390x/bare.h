/* r2 to r13, then r15 and r14. r0, r1 and the condition code are not a caller's to keep. */
#define REGISTERS 14
#define FLAGS(in) do { } while (0)
#define PAUSE() __asm__ volatile("diag 0,0,0x44" ::: "memory")
