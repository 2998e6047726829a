# Backcast, from a clean clone of Debian 12:
#
#   make demo    installs what is missing, builds the daemon and the command, fetches the default model
#                (94 MiB), and shows a daemon at work: three sessions, two of them pruned as they break
#                their budgets
#   make         builds everything, the tests too
#   make check   installs, builds and runs every test (release, then the small models under sanitizers)
#
# Everything else is CMake: `cmake --preset release && cmake --build build/release`.
.PHONY: all programs setup model demo check check-long bench format clean
JOBS ?= $(shell nproc)
BUILD = build/release

all: setup
	cmake --preset release
	cmake --build $(BUILD) -j $(JOBS)

setup:
	@.ci/setup

# the daemon and the command, and nothing that only tests need
programs: setup
	cmake --preset release
	cmake --build $(BUILD) -j $(JOBS) --target backcastd backcast

model: programs
	$(BUILD)/bin/backcast pull

demo: model
	$(BUILD)/bin/backcast demo --text tests/vectors/long-prompt.txt

check: setup
	tests/check.sh

check-long: setup
	tests/check.sh --long

bench: model all
	tests/bench/run.sh $(BUILD)

format:
	git ls-files '*.c' '*.h' '*.cc' '*.cu' '*.cuh' | grep -v '^tests/vectors' | xargs clang-format -i

clean:
	rm -rf build
