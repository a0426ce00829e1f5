#!/usr/bin/env bash
# A live trace of a stock kernel, on the screen. `make demo` builds what this runs.
set -euo pipefail
cd "$(dirname "$0")/.."

vmm=target/release/vmm
images=target/release/guest-images
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

kernel=$("$images" kernel 6.1)
"$images" initramfs --out "$work/initrd"

# A guest that reads two files, forks and ends; which of its functions are shown.
run() {
    echo "vmm run --kernel $1 --initrd $2 --cpus 2" \
        "--trace func -f 'vfs_*' -f '*_proc_show' -f kernel_clone -f do_exit -n vfs_utimes -n vfs_symlink" \
        "--cmdline 'quiet vmm.work=proc-read:/proc/version:50@0+proc-read:/proc/uptime:50@1,forks:20'"
}

if "$vmm" doctor --json | grep -Eq '"run_stock_kernels": *true'; then
    command=$(run "$kernel" "$work/initrd")
    echo "\$ $command" >&2
    PATH=$PWD/target/release:$PATH bash -c "$command"
else
    echo "This host's KVM can't run stock kernels: the demo runs in the nested lab, an emulated machine with AMD-V, which is slower." >&2
    command=$(run /boot/vmlinuz /boot/initrd)
    echo "\$ $command" >&2
    "$images" lab --program "$vmm" --file "$kernel:/boot/vmlinuz" --file "$work/initrd:/boot/initrd" \
        --timeout 300 -- "$command"
fi
