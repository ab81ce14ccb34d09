# make demo    train the example on 2 ranks until its loss has clearly fallen
# make test    lint, types and tests
# make bench   fxcomm beside compiled DDP (BENCH_FLAGS=--quick for under 2 minutes)
#
# Each makes the virtual environment that it needs in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -q -c constraints.txt -e
# The package is mapped from three folders; mypy reads it from this tree of links.
TYPES := build/types

DEMO_FLAGS ?=
BENCH_FLAGS ?=
TEST_FLAGS ?=

.PHONY: demo test lint bench clean

demo: $(VENV)/.examples
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 \
		examples/train_gpt.py --steps 300 --expect-fall 1.5 $(DEMO_FLAGS)

test: lint
	$(BIN)/python -m pytest $(TEST_FLAGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPES)
	mkdir -p $(TYPES)/fxcomm
	ln -s "$(CURDIR)"/fxcomm/* "$(CURDIR)"/backends "$(CURDIR)"/analysis $(TYPES)/fxcomm
	MYPYPATH=$(TYPES) $(BIN)/mypy -p fxcomm
	MYPYPATH=$(TYPES):examples:benchmarks $(BIN)/mypy --allow-untyped-calls \
		--no-warn-return-any --follow-imports silent examples benchmarks

bench: $(VENV)/.examples
	$(BIN)/python benchmarks/compare_ddp.py $(BENCH_FLAGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Stamps: a second run installs nothing.
$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.examples: $(VENV)/.made pyproject.toml constraints.txt
	$(INSTALL) '.[examples]'
	touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt
	$(INSTALL) '.[dev]'
	touch $@
