#!/bin/bash
# Installs what this project needs on a Debian machine (bookworm or newer). Safe to run again: it
# does nothing, quickly, when nothing is missing.
#
# QEMU must be 8.1 or newer. The multi-threaded TCG of 7.2 loses the guest kernel's own text
# changes (a stale translation keeps an int3 that is gone from memory), which hangs guests that
# switch their tracers or static keys. Where the suite's QEMU is older, the one from backports is
# installed, through an apt configuration of our own under the cache: /etc is left as it is.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${VMM_CACHE:-$root/.cache/guests}
qemu_needed=8.1

packages=(
    gcc libc6-dev make       # the Rust toolchain's linker; the programs that run inside guests
    gcc-s390x-linux-gnu libc6-dev-s390x-cross    # the same programs for guests of other
    gcc-aarch64-linux-gnu libc6-dev-arm64-cross  # architectures
    busybox-static           # the guests' user space; that of other architectures is fetched with
                             # their kernels
    kmod xz-utils zstd lz4   # module dependencies, packed modules, packed kernels
    cpio                     # lists archives in tests, as an independent reader
    trace-cmd protobuf-compiler    # read our traces in tests, likewise
    debian-archive-keyring   # signatures of the suites that kernels come from
    ca-certificates
)

qemu_packages=(qemu-system-x86 qemu-system-s390x qemu-system-arm)

say() { echo "setup: $*" >&2; }
die() { echo "setup: $*" >&2; exit 1; }

installed() { dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null | grep -qx installed; }
version_of() { dpkg-query --show --showformat='${Version}' "$1" 2>/dev/null || true; }
# Debian's QEMU versions carry the epoch 1.
new_enough() { [ -n "$1" ] && dpkg --compare-versions "$1" ge "1:$qemu_needed"; }

command -v apt-get >/dev/null && command -v dpkg-query >/dev/null ||
    die "this script knows Debian only; install QEMU $qemu_needed or newer for x86_64, s390x and aarch64, gcc for the same three, busybox (static), kmod, xz, zstd, cpio, trace-cmd and protoc by hand"

missing=()
for package in "${packages[@]}"; do
    installed "$package" || missing+=("$package")
done
qemu_missing=()
for package in "${qemu_packages[@]}"; do
    new_enough "$(version_of "$package")" || qemu_missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ] && [ ${#qemu_missing[@]} -eq 0 ]; then exit 0; fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || die "run this as root, or install sudo: packages are missing (${missing[*]} ${qemu_missing[*]})"
    as_root=(sudo)
fi
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o Dpkg::Use-Pty=0 "$@"; }
install() { apt install -y --no-install-recommends "$@" >&2; }

# One line "URI release" for each of the machine's own sources of Debian packages with that label,
# in whichever file and format it is written down.
sources() {
    apt-get indextargets --format '$(REPO_URI) $(RELEASE)' \
        'Created-By: Packages' 'Origin: Debian' "Label: $1" 'Component: main' | sort -u
}

say "reading package lists"
apt update >&2 || say "some package lists could not be read; going on with those that could"

if [ ${#missing[@]} -gt 0 ]; then
    say "installing ${missing[*]}"
    install "${missing[@]}"
fi

if [ ${#qemu_missing[@]} -gt 0 ]; then
    # What is missing is not installed, or too old: its candidate is what the sources serve.
    own_sources=yes
    for package in "${qemu_missing[@]}"; do
        candidate=$(apt-cache policy "$package" | sed -n 's/^ *Candidate: //p')
        new_enough "${candidate/(none)/}" || own_sources=no
    done
    if [ $own_sources = yes ]; then
        say "installing ${qemu_missing[*]} $candidate"
        install "${qemu_missing[@]}"
    else
        codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
        [ -n "$codename" ] || die "/etc/os-release names no release, so its backports cannot be found; install QEMU $qemu_needed or newer by hand"
        mirror=$(sources Debian | awk -v want="$codename" '$2 == want { print $1; exit }')
        [ -n "$mirror" ] || die "none of this machine's apt sources serves Debian $codename; install QEMU $qemu_needed or newer by hand"

        own=$cache/apt/backports-qemu
        mkdir -p "$own/lists/partial"
        {
            sources Debian | while read -r uri release; do echo "deb $uri $release main"; done
            sources Debian-Security | while read -r uri release; do echo "deb $uri $release main"; done
            echo "deb $mirror $codename-backports main"
        } >"$own/sources.list"
        options=(
            -o Dir::Etc::SourceList="$own/sources.list"
            -o Dir::Etc::SourceParts=/dev/null
            -o Dir::State::Lists="$own/lists"
            -o APT::Sandbox::User=root
            -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false
        )
        say "installing QEMU from $codename-backports: $codename has none that is $qemu_needed or newer"
        apt "${options[@]}" update >&2
        apt "${options[@]}" install -y --no-install-recommends -t "$codename-backports" "${qemu_missing[@]}" >&2
        "${as_root[@]}" rm -rf "$own"
    fi
fi

for package in "${qemu_packages[@]}"; do
    new_enough "$(version_of "$package")" ||
        die "$package is $(version_of "$package") after the installation, and $qemu_needed or newer is needed; upgrade it by hand"
done
say "done"
