/*
 * A function as this compiler makes it with the options of some kernel; NAME is the function's.
 * All of it but the pad is one jump.
 */

void body(void);

void NAME(void)
{
	body();
}
