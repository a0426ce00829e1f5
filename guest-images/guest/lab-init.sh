#!/bin/sh
# PID 1 of the nested lab's first-level guest: makes /dev/kvm, then runs what the host asks for over
# a virtio serial port, until the host closes it.
export PATH=/bin HOME=/ TERM=linux

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tracefs tracefs /sys/kernel/tracing
ln -sf /proc/self/fd /dev/fd

for module in /lib/modules/*.ko; do
    insmod "$module" || echo "LAB-FAILED insmod $module"
done
[ -e /dev/kvm ] || echo "LAB-FAILED there is no /dev/kvm"

# The port shows up a moment after its driver.
port=/dev/vport0p1
tries=0
until [ -e $port ] || [ $tries -eq 100 ]; do
    usleep 50000
    tries=$((tries + 1))
done
echo LAB-INIT
agent $port
echo LAB-DONE
poweroff -f
while :; do sleep 1000; done
