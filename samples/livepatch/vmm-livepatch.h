/*
 * What a payload of `vmm patch apply` says about itself.
 *
 * A function of the payload that is named as one of the guest's kernel replaces it; nothing has to be
 * said for that. The macros below say more. Each of them stands outside of functions, ends with a
 * semicolon, and leaves a string in the section .vmm.livepatch, which never comes into the guest.
 *
 * docs/live-patching.md tells how payloads are written, compiled and applied.
 */
#ifndef VMM_LIVEPATCH_H
#define VMM_LIVEPATCH_H

/* The payload's function `new` replaces the kernel's function `old`. */
#define VMM_REPLACE(new, old) VMM_LIVEPATCH_SAYS("replace=" #new ":" #old)

/*
 * Of several functions named `old` it replaces the one at the position `sympos`: 1 is the first in the
 * order of /proc/kallsyms, as for the kernel's own livepatches.
 */
#define VMM_REPLACE_AT(new, old, sympos) VMM_LIVEPATCH_SAYS("replace=" #new ":" #old "," #sympos)

/* The payload's function `name` replaces nothing, although the kernel has one of that name. */
#define VMM_HELPER(name) VMM_LIVEPATCH_SAYS("helper=" #name)

/*
 * The payload is for a kernel of this release, as `uname -r` prints it; * and ? stand for whatever.
 * Said several times, any of them will do.
 */
#define VMM_RELEASE(release) VMM_LIVEPATCH_SAYS("release=" release)

/* The payload is for the kernel with this build-id, in hexadecimal digits, and for no other. */
#define VMM_BUILD_ID(build_id) VMM_LIVEPATCH_SAYS("build-id=" build_id)

/*
 * While the payload is applied or reverted nobody may be inside a function that it replaces. That is so
 * for every payload that replaces several functions; with this, also for one that replaces one.
 */
#define VMM_CONSISTENT VMM_LIVEPATCH_SAYS("consistent=yes")

#define VMM_LIVEPATCH_SAYS(text) VMM_LIVEPATCH_STRING(__COUNTER__, text)
#define VMM_LIVEPATCH_STRING(number, text) VMM_LIVEPATCH_NAMED(number, text)
#define VMM_LIVEPATCH_NAMED(number, text)                                                         \
	static const char vmm_livepatch_##number[]                                                \
		__attribute__((used, section(".vmm.livepatch"), aligned(1))) = text

#endif
