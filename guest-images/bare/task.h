/*
 * What Linux has of a task, for records to tell: the first processor's task has this number and the
 * second's the next one, and each one's count of preemption and interrupts is as include/linux/preempt.h
 * has it. tests/src/bare.rs knows them.
 */
#define FIRST_PID	101
#define FIRST_COUNT	0x80010203
#define SECOND_COUNT	0x00000005
