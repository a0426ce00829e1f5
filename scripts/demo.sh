#!/usr/bin/env bash
# A live trace of a stock kernel, on the screen. `make demo` builds what this runs.
set -euo pipefail
cd "$(dirname "$0")/.."

images=target/release/guest-images
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

kernel=$("$images" kernel 6.1)
"$images" initramfs --out "$work/initrd"

# A guest that reads two files, forks and ends; which of its functions are shown. Where KVM can't run
# it, QEMU emulates it.
command="vmm run --kernel $kernel --initrd $work/initrd --cpus 2\
 --trace func -f 'vfs_*' -f '*_proc_show' -f kernel_clone -f do_exit -n vfs_utimes -n vfs_symlink\
 --cmdline 'quiet vmm.work=proc-read:/proc/version:50@0+proc-read:/proc/uptime:50@1,forks:20'"
echo "\$ $command" >&2
PATH=$PWD/target/release:$PATH bash -c "$command"
