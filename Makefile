# `make demo` and `make test` each do the whole set-up on a fresh machine: Python 3.11+, git and make suffice.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
OUT    ?= runs/demo
DEMO_FLAGS ?= vtune serve bundled --max-num-batched-tokens 512 --max-num-seqs 16
# A workload with prefix hits and preemptions, for the exact gate on what the engine does.
GATE := --workload shared-prefix --input-len 120 --output-len 12 --rate 8 --num-requests 16 \
	--flags "vtune serve bundled --max-num-batched-tokens 96 --max-num-seqs 6 --max-model-len 256 \
	--num-gpu-blocks-override 20"
COUNTERS := benchmarks/baselines/counters.json
CURES ?= runs/playbooks
PART ?= 10m

.DEFAULT_GOAL := help
.PHONY: help setup model demo test check gate counters playbooks facts format clean

help:  ## List the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vtune needs Python 3.11 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[engine,dev]'
	touch $@

setup: $(READY)  ## Create .venv and install everything

model: setup  ## Fetch the bundled model (93 MB, once) and compile the kernels, into the cache
	$(BIN)/python -m engine.models.bundled

demo: model  ## The main job: find flags for a flat inter-token latency, prove them, write a report
	$(BIN)/vtune optimize --slo itl --workload mixed --budget 12m --flags "$(DEMO_FLAGS)" --out $(OUT)

check: setup  ## Formatter, linter, types, import contracts, links, documented commands
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest tests/project

gate: model  ## What the engine does with a workload, counted and compared exactly with the baseline
	$(BIN)/vtune bench counters $(GATE) --baseline $(COUNTERS)

counters: model  ## Count the baseline of the gate anew, after a change that is meant
	$(BIN)/vtune bench counters $(GATE) --out $(COUNTERS)

test: model check gate  ## Every check and every test
	$(BIN)/pytest --ignore=tests/project -n 2 --dist loadfile --no-loadscope-reorder

playbooks: model  ## Prove every playbook's cure (about an hour, in parts: run it again to go on), and write the table
	-$(BIN)/vtune playbook run --all --simulated --out $(CURES)
	-$(BIN)/vtune playbook run --all --measured --pairs 3 --limit $(PART) --out $(CURES)
	-$(BIN)/vtune playbook run --all --measured --target simulated:two-cores --out $(CURES)/two-cores
	$(BIN)/python -m benchmarks.doctor.cures $(CURES) $(CURES)/two-cores

facts: setup  ## Read flags and metrics of every release off the wheels of the package index, and show the changes
	$(BIN)/python -m benchmarks.servers.make_facts

format:  ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Remove what the targets made (the model cache stays)
	rm -rf $(VENV) build dist *.egg-info runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
