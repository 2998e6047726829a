# Backcast, from a clean clone of Debian 12:
#
#   make demo    installs what is missing, fetches the default model (92 MB), builds, and shows a daemon
#                at work: three sessions, two of them pruned as they break their budgets
#   make check   installs, builds and runs every test (release, then the small models under sanitizers)
#
# Everything else is CMake: `cmake --preset release && cmake --build build/release`.
.PHONY: all setup model demo check check-long bench format clean
JOBS ?= $(shell nproc)
BUILD = build/release

all: setup
	cmake --preset release
	cmake --build $(BUILD) -j $(JOBS)

setup:
	@.ci/setup

model: all
	$(BUILD)/bin/backcast pull

demo: model
	$(BUILD)/bin/backcast demo --text tests/vectors/long-prompt.txt

check: setup
	tests/check.sh

check-long: setup
	tests/check.sh --long

bench: model
	tests/bench/run.sh $(BUILD)

format:
	git ls-files '*.c' '*.h' '*.cc' '*.cu' '*.cuh' | grep -v '^tests/vectors' | xargs clang-format -i

clean:
	rm -rf build
