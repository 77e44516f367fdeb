# Everything a newcomer or CI runs. Each goal sets up what it needs; nothing outside this folder is changed.
# Python >= 3.11 with venv, make and git are all it asks of the machine.

PYTHON ?= python3
VENV   ?= .venv
MODEL  ?= demo
ARGS   ?=
ROUNDS ?= 10
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check -qq
RUNTIME := $(VENV)/.runtime-installed
DEV     := $(VENV)/.dev-installed
TIMED   = t0=$$(date +%s); $(1) && echo "tandem: $(2) took $$(( $$(date +%s) - t0 )) s"

.PHONY: install dev serve check format test chaos fuzz bench bench-engine bench-serve bench-startup bench-multiturn \
  bench-weight-stream bench-lora clean help

help: ## show these goals
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

install: $(RUNTIME) ## virtual environment with pinned dependencies

dev: $(DEV) ## the same with the development tools (tests, linters, the openai client)

$(BIN)/python:
	@echo "tandem: creating $(VENV)"; $(PYTHON) -m venv $(VENV)

# torch goes first and alone: an unpinned torch in a later step would pull another build.
$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	@echo "tandem: installing pinned dependencies into $(VENV) (once; about a minute with a warm package cache)"
	@$(call TIMED,$(PIP) install -c constraints.txt torch && $(PIP) install -c constraints.txt -e .,installation)
	@touch $@

$(DEV): $(RUNTIME)
	@$(call TIMED,$(PIP) install -c constraints.txt -e '.[dev]',installation of the development tools)
	@touch $@

serve: $(RUNTIME) ## serve MODEL (default: the bundled demo) on http://127.0.0.1:8000; ARGS="-tp 2 ..." are passed on
	@exec $(BIN)/tandem serve "$(MODEL)" $(ARGS)

check: $(DEV) ## format, lint, types on the torch-free half, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/architecture

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Both on two workers: what computes test by test, what starts clusters or watches clocks file by file. Threads that wait
# for each other sleep: on cores that others want too, those that spin take their time from them.
test: $(DEV) ## all tests; under 15 minutes on 2 cores
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests/architecture tests/unit tests/parity tests/distributed/*_ranks.py -n 2
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests/distributed tests/integration --ignore-glob='*_ranks.py' -n 2 --dist loadfile

chaos: $(DEV) ## long histories of faults and thrash, not part of test
	$(BIN)/python -m pytest tests -m chaos --timeout 3600

fuzz: $(DEV) ## property and stateful tests with new random examples, ROUNDS (10) times
	for i in $$(seq $(ROUNDS)); do $(BIN)/python -m pytest tests/unit -m "hypothesis and not chaos" --hypothesis-profile=fuzz -n 2 || exit; done

bench: bench-engine bench-serve ## every benchmark that compares; results under out/benchmarks

bench-engine: $(DEV) ## offline throughput against the memory floor and transformers
	$(BIN)/python -m benchmarks.throughput $(ARGS)

bench-serve: $(DEV) ## the same workload over HTTP against offline, A-B-A-B
	$(BIN)/python -m benchmarks.serve $(ARGS)

bench-startup: $(DEV) ## seconds to the first answer, idle CPU and memory of all processes
	$(BIN)/python -m benchmarks.startup $(ARGS)

bench-multiturn: $(DEV) ## KV tiers: a conversation trace per set of tiers, one returning turn, copy or recompute
	$(BIN)/python -m benchmarks.multiturn $(ARGS)

bench-weight-stream: $(DEV) ## decode with 100, 75, 50 and 25 % of the layers on the device, against the floor of bytes and operations
	$(BIN)/python -m benchmarks.weight_stream $(ARGS)

bench-lora: $(DEV) ## LoRA adapters: decode speed, memory, TTFT when they outnumber the room, peft beside it
	$(BIN)/python -m benchmarks.lora $(ARGS)

clean: ## remove what was built here (not the virtual environment)
	rm -rf out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
