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

# A guest that reads a file, forks and ends; which of its functions are shown; what it is told.
trace=(--trace func -f 'vfs_*' -f '*_proc_show' -f kernel_clone -f do_exit -n vfs_utimes -n vfs_symlink)
cmdline='quiet vmm.work=proc-read:/proc/version:50@0+proc-read:/proc/uptime:50@1,forks:20'
run() { printf 'vmm run --kernel %s --initrd %s --cpus 2' "$1" "$2"; printf ' %q' "${trace[@]}" --cmdline "$cmdline"; }

if "$vmm" doctor --json | grep -Eq '"run_stock_kernels": *true'; then
    echo "\$ $(run "$kernel" "$work/initrd")" >&2
    PATH=$PWD/target/release:$PATH bash -c "$(run "$kernel" "$work/initrd")"
else
    echo "This host's KVM can't run stock kernels: the demo runs in the nested lab, an emulated machine with AMD-V, which is slower." >&2
    command=$(run /boot/vmlinuz /boot/initrd)
    echo "\$ $command" >&2
    "$images" lab --program "$vmm" --file "$kernel:/boot/vmlinuz" --file "$work/initrd:/boot/initrd" \
        --timeout 300 -- "$command"
fi
