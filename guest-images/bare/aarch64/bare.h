/* x0 to x8, x10 to x15, x18 to x29, the condition flags; then sp and x30. x9, x16 and x17 are not a
 * caller's to keep. */
#define REGISTERS 30
#define FLAGS(in) (in)[27] &= 0xf0000000
#define PAUSE() __asm__ volatile("yield" ::: "memory")
