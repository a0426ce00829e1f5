#!/bin/bash
# Runs the benchmarks and writes their figures into docs/benchmarks.md. `make bench` installs first
# what this needs. The machine must be idle: everything is measured against a baseline in the same
# run, but noise makes ratios worse as well.
set -euo pipefail
cd "$(dirname "$0")/.."

results=$PWD/target/benchmarks
plots=docs/benchmarks
mkdir -p "$results" "$plots"
say() { echo "bench: $*" >&2; }
bench() { ${CARGO:-cargo} bench --quiet --package benches --bench "$@"; }

${CARGO:-cargo} build --release --quiet --package vmm --package benches

say "the price of one traced call, natively"
bench price -- --json "$results/price.jsonl"

say "vmm bench stop-all, a bare guest"
target/release/vmm bench stop-all --cpus 1,2,4 --sites 1,10,100,1000,all --rounds 200 \
    --json "$results/stop-all.json" --plot "$plots/stop-all.svg"

say "side by side with a guest's own ftrace, a debugger and traps; boots guests under emulation"
bench side_by_side | tee >(cat >&2) | grep -a "^{" > "$results/side-by-side.jsonl"

say "parts of stops, finding a kernel, draining, the control socket (not in the document)"
bench standstill
bench discovery
bench drain
bench control

target/release/figures "$results" docs/benchmarks.md
say "docs/benchmarks.md and $plots have the new figures"
