# Every target sets up what it needs; python3, pip and make are enough. It works from any folder:
# make -f path/to/Makefile test
#
#   PYTHON=python3.13   the interpreter (default: the first of python3, python3.13, 3.12, 3.11 that is 3.11 to 3.13)
#   VENV=.venv-other    the environment to create and use (default: .venv)
#   JOBS=4              number of test processes (default: one per core)
#   ARGS='-k parser'    more arguments for pytest
#   LOCK=.ci/requirements.txt  installs the versions that this file pins, with their hashes (default: the newest ones)
#   STEPS=20            steps of the demo's training run (default: 100)

PYTHON ?=
VENV ?= .venv
JOBS ?=
ARGS ?=
EXTRAS ?= dev,train
LOCK ?=

# Through the shell instead of $(abspath), so that a path with a space works.
ROOT := $(shell cd "$$(dirname '$(strip $(MAKEFILE_LIST))')" && pwd)
IN := cd "$(ROOT)" &&
BIN := "$(VENV)/bin"
PIP := -m pip --disable-pip-version-check --no-input

# A package index may fail once. What needs one is tried again: $(TWICE) command argument...
TWICE := sh -c '"$$0" "$$@" || { echo "this failed, and is tried once more: $$*" >&2; "$$0" "$$@"; }'

# What a test may take, in seconds, where one compiles or trains for many minutes: see timeout in pyproject.toml.
LONG := --timeout=5400 -o faulthandler_timeout=6000

# `tests PYTHON ARGUMENT...` runs pytest, several times in one target. ARGS may select no test of one run, where pytest ends
# with 5, but not of all of them.
PYTESTS := status=5; tests() { python=$$1; shift; "$$python" -m pytest "$$@"; code=$$?; \
	case $$code in 5) ;; 0) [ $$status != 5 ] || status=0 ;; *) status=$$code ;; esac; }

# The tests start many processes. Each would compile JAX's Python code again if none may keep the result.
unexport PYTHONDONTWRITEBYTECODE

# CHROMIUM=/path/to/chromium is the browser (default: the first of chromium, chromium-browser, google-chrome on PATH).
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
INSTALL_BROWSER = if [ -z "$(CHROMIUM)" ]; then echo "there is no chromium on PATH: make $@ CHROMIUM=/path/to/chromium" >&2; exit 1; fi; \
	$(BIN)/python -c 'import playwright' 2>/dev/null || $(BIN)/python .ci/install -e '.[browser]' || { \
	  echo "playwright could not be installed; see the output above" >&2; exit 1; }

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup setup-browser lock demo docs vscode pictures test test-slow test-newest test-mutations test-nobody test-wheel test-browser \
	test-slurm slurm-start slurm-stop test-cuda test-trainers test-servers test-others setup-te test-te maxtext-compiled check check-lint check-format check-imports check-types \
	check-api check-hooks check-budget format wheel clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' "$(ROOT)/Makefile" | while IFS='|' read -r name text; do \
	  printf '%-18s %s\n' "$$name" "$$text"; done

STEPS ?= 100
demo: setup ## lint the bundled policies, show one, and train a small Llama under it (80 s of processor time)
	@$(IN) echo "policyc lint policies/*.policy" && $(BIN)/policyc lint policies/*.policy
	@$(IN) echo "policyc show llama_nvfp4" && $(BIN)/policyc show llama_nvfp4
	@$(IN) rm -rf runs/demo && words="train --config tiny --policy llama_nvfp4 --steps $(STEPS) --eval-every 50 --folder runs/demo" && \
	echo "policyc $$words" && $(BIN)/policyc $$words && \
	echo "This showed that the MLPs of a small Llama train in NVFP4, with every code and scale emulated to the bit. It says nothing about" && \
	echo "speed (see 'policyc estimate'), or about what NVFP4 costs in loss (see 'policyc sweep', which compares with bf16 over seeds)."

# Strict: a broken link, a page that no menu has or a name that the reference cannot find ends it.
docs: setup ## build the documentation as a site into build/docs, which needs no server
	@$(IN) $(BIN)/python -c 'import mkdocs, mkdocstrings_handlers.python' 2>/dev/null || \
	  $(BIN)/python .ci/install -e '.[docs]' || { \
	  echo "mkdocs could not be installed; see the output above" >&2; exit 1; }
	@$(IN) NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict && echo "open build/docs/index.html"

# What package-lock.json names, with its hashes. No package runs a script.
NPM_CI = npm ci --ignore-scripts --no-audit --no-fund --loglevel=error

# In a copy: npm writes beside the sources. The package of the editor holds the client's libraries.
vscode: ## test the colors of the VS Code extension, and package it into build/policyc.vsix (needs Node.js 20 and npm)
	@$(IN) command -v npm >/dev/null || { echo "there is no npm on PATH: install Node.js 20 or later" >&2; exit 1; }; \
	mkdir -p build/vscode && cp -R grammars/vscode/. LICENSE build/vscode && cd build/vscode && \
	$(NPM_CI) && node test.js && \
	npx --no vsce package --allow-missing-repository --out ../policyc.vsix >/dev/null && \
	echo "code --install-extension build/policyc.vsix"

DRAW_DIFF := diff llama.policy --config llama3_8b --devices 8 --out
pictures: setup ## draw the pictures of README.md and docs/ again (needs chromium)
	@$(IN) bin=$$(cd $(BIN) && pwd) && cd docs/pictures && "$$bin/policyc" $(DRAW_DIFF) diff.svg && "$$bin/python" draw_search.py
	@$(IN) $(INSTALL_BROWSER); bin=$$(cd $(BIN) && pwd); cd docs/pictures; page=$$(mktemp -d) && \
	"$$bin/policyc" $(DRAW_DIFF) "$$page/page.html" && \
	"$$bin/policyc" report ../results/19m --config llama3_8b --out "$$page/report.html" && \
	"$$bin/python" draw_pages.py "$$page/page.html" "$$page/report.html" "$(CHROMIUM)"; status=$$?; rm -rf "$$page"; exit $$status

test: setup ## run the fast tests
	@$(IN) $(BIN)/python -m pytest -n $(or $(JOBS),auto) --dist worksteal $(ARGS)

test-slow: setup ## run the slow tests: fuzzing, scaling
	@$(IN) $(BIN)/python -m pytest -n $(or $(JOBS),auto) --dist worksteal --timeout=1200 -m slow $(ARGS)

# Files without a test that depends on JAX are not even imported.
test-newest: ## run the tests that depend on JAX with the newest Python (from PATH or pyenv) and JAX
	@$(IN) python=$$(.ci/newest-python) && \
	files=$$(grep -rL --include='test_*.py' '^pytestmark = .*any_jax' tests | tr '\n' ' ') && \
	$(MAKE) --no-print-directory -f "$(ROOT)/Makefile" VENV=.venv-newest PYTHON="$$python" test ARGS="-m 'not any_jax' $$files $(ARGS)"

# Only the files with such tests: to import all others takes longer than the tests.
test-nobody: setup ## run the tests of permissions and processes as the user nobody (Linux, root only)
	@$(IN) .ci/as-nobody $(BIN)/python -m pytest -p no:cacheprovider -p no:xdist -m ordinary_user \
	  $$(grep -rl --include='test_*.py' 'mark\.ordinary_user' tests) $(ARGS)

setup-browser: setup ## also install what test-browser needs, except Chromium
	@$(IN) $(INSTALL_BROWSER)

test-browser: setup ## open the pages of diffs and reports in Chromium, and use them
	@$(IN) $(INSTALL_BROWSER); CHROMIUM="$(CHROMIUM)" $(BIN)/python -m pytest -p no:xdist -m browser \
	  tests/changes/test_browser.py tests/changes/test_pictures.py tests/experiments/test_report_browser.py $(ARGS)

# A Slurm cluster of one node on this machine, all of whose files are in one folder. It needs no root. If Slurm is not
# installed, Debian's packages are downloaded and unpacked; they are not installed.
SLURM_CLUSTER := tests/support/slurm_cluster.sh
SLURM_FOLDER ?= /tmp/policyc-slurm
export SLURM_PACKAGES := build/slurm

test-slurm: setup ## run sweeps on a Slurm cluster that is started here (Linux; Debian's packages if Slurm is not installed)
	@$(IN) $(SLURM_CLUSTER) download "$$SLURM_PACKAGES" >&2 || exit 1; folder=$$(mktemp -d); \
	trap '$(SLURM_CLUSTER) stop "$$folder"; rm -rf "$$folder"' EXIT; trap 'exit 1' INT TERM; \
	$(SLURM_CLUSTER) start "$$folder" && . "$$folder/environment" && \
	$(BIN)/python -m pytest -p no:xdist --timeout=1200 -m slurm tests/experiments/test_slurm_cluster.py $(ARGS)

slurm-start: ## start that cluster and leave it running; SLURM_FOLDER=dir is the folder of its files
	@$(IN) $(SLURM_CLUSTER) download "$$SLURM_PACKAGES" >&2 && $(SLURM_CLUSTER) start "$(SLURM_FOLDER)" && \
	echo 'Slurm runs: . "$(SLURM_FOLDER)/environment"'

slurm-stop: ## stop it, with all its jobs
	@$(IN) $(SLURM_CLUSTER) stop "$(SLURM_FOLDER)" && rm -rf "$(SLURM_FOLDER)"

# SOURCES=dir are the sources of the installed version of SUITE, with its tests. For the newest JAX:
# make test-others VENV=.venv-newest PYTHON=python3.13 SUITE=flax SOURCES=dir ARGS=tests/nnx
SUITE ?= jax
SOURCES ?=

test-others: setup ## run the tests of JAX, optax, equinox or flax under policies that change nothing (hours); SUITE=jax SOURCES=dir
	@$(IN) [ -d "$(SOURCES)" ] || { echo "make test-others SUITE=$(SUITE) SOURCES=dir: dir are its sources" >&2; exit 1; }; \
	$(BIN)/python tests/support/other_suites.py "$(SUITE)" "$(SOURCES)" $(ARGS)

# XLA's CUDA compiler needs 4 GB of packages, so it has its own environment. A process can compile kernels for one GPU
# only, so each file runs in its own.
test-cuda: ## compile for GPUs that need not be present, and check the result (4 GB of packages, some minutes)
	@$(MAKE) -f "$(ROOT)/Makefile" VENV=.venv-cuda EXTRAS=dev,cuda13,train LOCK= setup
	@$(IN) .venv-cuda/bin/python -c 'import cudnn' 2>/dev/null || .venv-cuda/bin/python $(PIP) install -qq nvidia-cudnn-frontend
	@$(IN) export JAX_ENABLE_COMPILATION_CACHE=false JAX_PLATFORMS=cpu; $(PYTESTS); \
	pytest() { tests .venv-cuda/bin/python -p no:xdist $(LONG) -m "cuda and not slow" "$$@" $(ARGS); }; \
	pytest tests/hardware/test_cuda.py; \
	for target in h200 gb200; do export PTX_TARGET=$$target; pytest tests/hardware/test_kernel_ptx.py; done; exit $$status

# The JAX part of Transformer Engine is compiled against the installed JAX. These versions are known to work together.
TE_JAX := 0.11.2
TE := 2.20.2

setup-te: ## build Transformer Engine into .venv-te (once, 10 to 30 minutes, without a GPU)
	@$(IN) venv=.venv-te; wants="jax $(TE_JAX), te $(TE)"; \
	why() { echo "the te backend cannot be tested here: $$*" >&2; exit 1; }; \
	[ "$$(uname -s)" = Linux ] || why "Transformer Engine needs Linux"; \
	command -v g++ >/dev/null || why "building Transformer Engine needs a C++ compiler (g++)"; \
	$(MAKE) --no-print-directory -f "$(ROOT)/Makefile" setup VENV=$$venv || exit 1; \
	$$venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  why "JAX $(TE_JAX) needs Python 3.12: make test-te PYTHON=python3.12"; \
	if [ "$$(cat $$venv/.te 2>/dev/null)" != "$$wants" ]; then \
	  echo "building Transformer Engine $(TE) for JAX $(TE_JAX) into $$venv (10 to 30 minutes)"; \
	  $(TWICE) $$venv/bin/python $(PIP) install -qq setuptools wheel ninja cmake pybind11 flax "jax[cuda13]==$(TE_JAX)" nvidia-nvtx \
	    nvidia-curand nvidia-cudnn-frontend || why "the CUDA wheels of JAX could not be installed"; \
	  NVTE_FRAMEWORK=jax NVTE_BUILD_USE_NVIDIA_WHEELS=1 $$venv/bin/python $(PIP) install -qq --no-build-isolation \
	    "transformer-engine[core-cu13,jax]==$(TE)" || why "the build failed; see the output of pip above"; \
	  echo "$$wants" >$$venv/.te; \
	fi

test-te: setup-te ## test the te backend with Transformer Engine
	@$(IN) JAX_ENABLE_COMPILATION_CACHE=false JAX_PLATFORMS=cpu .venv-te/bin/python -m pytest -p no:xdist $(LONG) -m te \
	  tests/numerics/test_transformer_engine.py $(ARGS)

# MaxText is beside Transformer Engine, not in its environment, which must keep its JAX: pip finds there what MaxText needs
# through te.pth. Transformer Engine looks for CUDA's libraries in the environment of the interpreter, so that one runs.
maxtext-compiled: setup-te ## compile MaxText's step for GB200 under Transformer Engine's flags and under policies (an hour)
	@$(IN) venv=.venv-te-maxtext; mkdir -p build; \
	{ echo "# $(TE_JAX) $(TE)"; sed '/^# The other trainers/,$$d' tests/trainers-requirements.txt; } >build/maxtext-requirements.txt; \
	if ! cmp -s build/maxtext-requirements.txt $$venv/.installed-from; then \
	  echo "installing MaxText into $$venv (some minutes; only when it changes)"; \
	  rm -rf $$venv && .venv-te/bin/python -m venv $$venv && \
	  echo "import site; site.addsitedir('$$PWD/.venv-te/lib/python3.12/site-packages')" >$$venv/lib/python3.12/site-packages/te.pth && \
	  $(TWICE) $$venv/bin/python $(PIP) install -qq -r build/maxtext-requirements.txt || { \
	    echo "MaxText could not be installed; see the output of pip above" >&2; exit 1; }; \
	  cp build/maxtext-requirements.txt $$venv/.installed-from; \
	fi; \
	PYTHONPATH=$$venv/lib/python3.12/site-packages .venv-te/bin/python -m benchmarks.maxtext_compiled \
	  --json docs/results/maxtext_gb200.json $(ARGS)

# The trainers need Python 3.12 and many packages that nothing else here needs, so they have their own environments:
# Hugging Face's models in Flax need an older version of Transformers than Levanter.
# TRAINERS_SOURCES=dir is a folder with source distributions that are unpacked already (default: they are downloaded).
HAIKU := 0.0.17
TRAINERS_SOURCES ?=

test-servers: ## read exported files with compressed-tensors, ModelOpt, transformers and gfloat on the CPU (1 GB)
	@$(IN) venv=.venv-servers; \
	if ! cat pyproject.toml tests/servers-requirements.txt | cmp -s - "$$venv/.installed-from"; then \
	  rm -rf "$$venv" && $(or $(PYTHON),python3) -m venv "$$venv" && \
	  "$$venv/bin/python" .ci/install -r tests/servers-requirements.txt -e '.[train]' || { \
	    echo "the libraries of servers could not be installed; see the output above" >&2; rm -rf "$$venv"; exit 1; }; \
	  cat pyproject.toml tests/servers-requirements.txt >"$$venv/.installed-from"; fi; \
	"$$venv/bin/python" -m pytest -p no:xdist $(LONG) -m servers tests/serving/test_servers.py $(ARGS)

test-trainers: ## run MaxText, Levanter, Tunix, Haiku's transformer and Hugging Face's Flax models under policies (20 minutes, 3 GB)
	@$(IN) \
	venv=.venv-trainers; python=; \
	for one in "$(PYTHON)" python3.12 python3; do \
	  if "$$one" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; then python="$$one"; break; fi; done; \
	if [ -z "$$python" ]; then \
	  echo "the trainers need Python 3.12, which was not found: make test-trainers PYTHON=/path/to/python3.12" >&2; exit 1; fi; \
	install() { \
	  if ! cat pyproject.toml "$$2" | cmp -s - "$$1/.installed-from"; then \
	    echo "installing $$2 into $$1 with $$("$$python" -V) (some minutes; only when they change)"; \
	    rm -rf "$$1" && "$$python" -m venv "$$1" && \
	    "$$1/bin/python" .ci/install -r "$$2" -e . || { \
	      echo "the trainers could not be installed; see the output above" >&2; rm -rf "$$1"; exit 1; }; \
	    cat pyproject.toml "$$2" >"$$1/.installed-from"; \
	  fi; }; \
	install "$$venv" tests/trainers-requirements.txt; install .venv-hf-flax tests/hf-flax-requirements.txt; \
	sources="$(TRAINERS_SOURCES)"; \
	if [ -z "$$sources" ]; then \
	  sources="$$PWD/$$venv/sources"; \
	  if [ ! -d "$$sources/dm_haiku-$(HAIKU)" ]; then \
	    { $(TWICE) "$$venv/bin/python" $(PIP) download -qq --no-deps --no-binary dm-haiku -d "$$sources" "dm-haiku==$(HAIKU)" && \
	      tar xzf "$$sources/dm_haiku-$(HAIKU).tar.gz" -C "$$sources"; } || { \
	      echo "the source of Haiku could not be downloaded; see the output of pip above" >&2; exit 1; }; \
	  fi; \
	fi; \
	export JAX_ENABLE_COMPILATION_CACHE=false TRAINERS_SOURCES="$$sources"; $(PYTESTS); \
	tests "$$venv/bin/python" $(LONG) -m trainers tests/compiler/test_trainers.py tests/compiler/test_public_trainers.py \
	  tests/compiler/test_trainer_kinds.py $(ARGS); \
	tests .venv-hf-flax/bin/python $(LONG) -m trainers tests/compiler/test_trainer_kinds.py $(ARGS); exit $$status

test-mutations: setup ## plant faults into a copy, and check that the tests catch each (20 minutes); ARGS='compiler' takes some of them
	@$(IN) $(BIN)/python -m tests.support.mutations $(ARGS)

check: check-lint check-format check-imports check-types check-api check-hooks check-budget ## all of the following

check-lint: setup ## the linter
	@$(IN) $(BIN)/ruff check .

check-format: setup ## the format of the code
	@$(IN) $(BIN)/ruff format --check .

check-imports: setup ## the direction of imports
	@$(IN) $(BIN)/lint-imports

# CI keeps no cache: to write one takes a sixth of the time.
check-types: setup ## the types of the code
	@$(IN) $(BIN)/mypy $(if $(CI),--no-incremental)

# Every name that py.typed lets a user's type checker see has a type. Without PYTHONPATH, pyright does not find the
# editable installation.
check-api: setup ## the types that a user of the package sees (needs node)
	@$(IN) if ! command -v node >/dev/null; then echo "no node on PATH: the types of the public API are not checked" >&2; exit; fi; \
	PYTHONPATH="$(ROOT)" $(BIN)/pyright --verifytypes policyc --ignoreexternal --pythonpath $(BIN)/python

check-hooks: setup ## the files of pre-commit
	@$(IN) $(BIN)/pre-commit validate-manifest .pre-commit-hooks.yaml && $(BIN)/pre-commit validate-config

check-budget: setup ## the lines of source and of tests against their budget
	@$(IN) $(BIN)/python .ci/budget

format: setup ## format the code, and apply the linter's safe fixes
	@$(IN) $(BIN)/ruff check --fix-only --quiet .
	@$(IN) $(BIN)/ruff format .

wheel: setup ## build the sdist, and the wheel from it, into dist/
	@$(IN) rm -rf dist && echo "building into dist/" && \
	said=$$($(BIN)/python -m build --no-isolation --outdir dist . 2>&1) || { echo "$$said" >&2; exit 1; }; ls dist

test-wheel: wheel ## build them, check what they contain, and use the wheel in an empty environment
	@$(IN) $(BIN)/python .ci/test-wheel

clean: ## remove the environments, caches and build outputs
	@$(IN) rm -rf .venv .venv-newest .venv-cuda .venv-trainers .venv-servers .venv-hf-flax .venv-te .venv-te-maxtext dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@$(IN) find policyc tests models benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment is created again when the interpreter or the path of the checkout changes, and the packages are
# installed again when pyproject.toml or LOCK changes. Files in the environment record what it was made from. One that is a link
# belongs to the checkout where it is, and serves its copies too.
setup: ## create the environment in .venv; the other targets do it when needed
	@$(IN) \
	venv="$(VENV)"; \
	fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; \
	chosen="$(PYTHON)"; python=; \
	if [ -n "$$chosen" ]; then set -- "$$chosen"; else set -- python3 python3.13 python3.12 python3.11; fi; \
	for one in "$$@"; do if "$$one" -c "$$fits" >/dev/null 2>&1; then python="$$one"; break; fi; done; \
	if [ -z "$$python" ]; then \
	  echo "policyc needs Python 3.11 to 3.13, and found none in $$*: make PYTHON=/path/to/python3" >&2; exit 1; fi; \
	python=$$("$$python" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))') || exit 1; \
	home="$$PWD"; if [ -L "$$venv" ]; then home=$$(dirname "$$(readlink "$$venv")"); fi; \
	made_from="$$home $$("$$python" -c 'import sys; print(sys.base_prefix, sys.version.split()[0])')"; \
	if [ "$$(cat "$$venv/.made-from" 2>/dev/null)" != "$$made_from" ]; then \
	  echo "setting up $$venv with $$("$$python" -V)"; \
	  rm -rf "$$venv"; \
	  if ! said=$$("$$python" -m venv "$$venv" 2>&1); then \
	    echo "Python's venv module does not work here: using virtualenv instead"; \
	    rm -rf "$$venv"; tools=$$(mktemp -d) || exit 1; trap 'rm -rf "$$tools"' EXIT; \
	    { "$$python" $(PIP) install -qq --target "$$tools" virtualenv || pip install -qq --target "$$tools" virtualenv; } && \
	    PYTHONPATH="$$tools" "$$python" -m virtualenv -q "$$venv" || { \
	      echo "the environment could not be created; venv printed:" >&2; echo "$$said" >&2; rm -rf "$$venv"; exit 1; }; \
	  fi; \
	  echo "$$made_from" >"$$venv/.made-from"; \
	fi; \
	if ! cat pyproject.toml $(LOCK) | cmp -s - "$$venv/.installed-from"; then \
	  echo "installing policyc and its requirements into $$venv (a minute or two; only when they change)"; \
	  { if [ -n "$(LOCK)" ]; then \
	    $(TWICE) "$$venv/bin/python" $(PIP) install --no-compile -qq --require-hashes -r "$(LOCK)" && \
	    "$$venv/bin/python" $(PIP) install -qq --no-deps --no-build-isolation -e .; \
	  else "$$venv/bin/python" .ci/install -e '.[$(EXTRAS)]'; fi; } || { \
	    echo "the installation failed; make clean starts over" >&2; exit 1; }; \
	  cat pyproject.toml $(LOCK) >"$$venv/.installed-from"; \
	fi

lock: setup ## pin the newest versions for development, with the newest and with the oldest JAX
	@$(IN) $(BIN)/python .ci/lock
