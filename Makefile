# What a person types. Each target does all the set-up it needs.

CARGO ?= cargo

.PHONY: help check test demo bench setup clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: ## install the packages that builds, guests and tests need
	scripts/setup.sh

check: setup ## format, lints, docs and unit tests: minutes
	$(CARGO) fmt --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --quiet
	$(CARGO) test --workspace --lib --bins --quiet

test: check ## everything, whole guests included
	@# Tests have it built if need be, and then while a guest that they have started is busy.
	$(CARGO) build --quiet --package vmm --bin vmm
	$(CARGO) test --workspace --test '*' --no-fail-fast -- --test-threads=1
	$(CARGO) test --workspace --doc --quiet

demo: setup ## watch a stock kernel's functions being called
	$(CARGO) build --release --quiet --package vmm --package guest-images
	scripts/demo.sh

bench: setup ## figures, as ratios against what stands beside them; rewrites docs/benchmarks.md
	scripts/bench.sh

clean: ## remove what was built; guests stay in the cache
	$(CARGO) clean
