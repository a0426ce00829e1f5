#!/bin/sh
# PID 1 of a guest under test. What it does is chosen on the kernel's command line:
#
#   vmm.beside=LIST    workloads that run beside everything else, as `work` reads them (guest/work.c)
#   vmm.work=LIST      workloads that end before anything else happens
#   vmm.graph=LIST     functions whose calls and returns the guest's own function_graph shows while
#                      `work` does what vmm.graph-work says; before vmm.work, between VMM-GRAPH-BEGIN
#                      and VMM-GRAPH-END
#   vmm.script=FILE    a script of the initramfs that ends before anything else happens, behind the
#                      workloads
#   vmm.dump=LIST      afterwards, what the guest itself says: kallsyms, aff (the functions that
#                      its ftrace can trace), dmesg, cpuinfo, modules, notes (those of the kernel's
#                      ELF file, as they are), tasks (each one's /proc/PID/task/TID/stat)
#   vmm.dump-to=DEVICE where dumps go, as one stream: a block or character device; default: console
#   vmm.after=WHAT     poweroff (default), reboot, panic, stay or shell
#
# On the console: VMM-INIT when user space is up, the marks of `work`, for each dump
# "VMM-DUMP-BEGIN NAME", its lines and "VMM-DUMP-END NAME", and VMM-DONE before the end.
export PATH=/bin HOME=/

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tracefs tracefs /sys/kernel/tracing
# Symbols' addresses, and SysRq for vmm.after=panic.
echo 0 >/proc/sys/kernel/kptr_restrict
echo 1 >/proc/sys/kernel/sysrq

for module in /lib/modules/*.ko; do
    [ -e "$module" ] && { insmod "$module" || echo "VMM-FAILED insmod $module"; }
done

beside= work= graph= graph_work= script= dump= dump_to=/dev/console after=poweroff
read -r cmdline </proc/cmdline
for word in $cmdline; do
    case $word in
    vmm.beside=*) beside=${word#*=} ;;
    vmm.work=*) work=${word#*=} ;;
    vmm.graph=*) graph=${word#*=} ;;
    vmm.graph-work=*) graph_work=${word#*=} ;;
    vmm.script=*) script=${word#*=} ;;
    vmm.dump=*) dump=${word#*=} ;;
    vmm.dump-to=*) dump_to=${word#*=} ;;
    vmm.after=*) after=${word#*=} ;;
    esac
done

show() {
    case $1 in
    kallsyms) cat /proc/kallsyms ;;
    aff) cat /sys/kernel/tracing/available_filter_functions ;;
    dmesg) dmesg ;;
    cpuinfo) cat /proc/cpuinfo ;;
    modules) cat /proc/modules ;;
    notes) cat /sys/kernel/notes ;;
    tasks)
        # Without a process of its own for each, which would be a task, too.
        for stat in /proc/[0-9]*/task/[0-9]*/stat; do
            read -r line <"$stat" && echo "$line"
        done
        ;;
    *) echo "VMM-FAILED there is no dump $1" ;;
    esac
}

echo VMM-INIT
if [ -n "$beside" ]; then work "$beside" & fi
if [ -n "$graph" ]; then
    cd /sys/kernel/tracing
    IFS=,
    # Those that this kernel does not have are left out.
    for function in $graph; do echo "$function" >>set_ftrace_filter; done 2>/dev/null
    unset IFS
    echo 1 >options/funcgraph-proc
    echo function_graph >current_tracer
    work "$graph_work"
    echo 0 >tracing_on
    echo VMM-GRAPH-BEGIN
    cat trace
    echo nop >current_tracer
    echo >set_ftrace_filter
    echo 1 >tracing_on
    cd /
    echo VMM-GRAPH-END
fi
if [ -n "$work" ]; then work "$work"; fi
if [ -n "$script" ]; then sh "$script"; fi
if [ -n "$dump" ]; then
    IFS=,
    {
        for name in $dump; do
            echo "VMM-DUMP-BEGIN $name"
            show "$name"
            echo "VMM-DUMP-END $name"
        done
        echo VMM-DUMPS-DONE
    } >"$dump_to"
    unset IFS
    sync
fi
echo VMM-DONE

case $after in
poweroff) poweroff -f ;;
reboot) reboot -f ;;
panic) echo c >/proc/sysrq-trigger ;;
stay) ;;
shell)
    setsid cttyhack sh
    poweroff -f
    ;;
*) echo "VMM-FAILED there is no vmm.after=$after" ;;
esac
# The end of PID 1 would be the guest's.
while :; do sleep 1000; done
