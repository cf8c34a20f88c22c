# `make serve` and `make test` are all a newcomer needs; both install what they need on the first run.
# Variables: ARGS (for octavo), PYTEST_ARGS, TEST_PROCESSES (0: only pytest's own process, for a debugger), PYTHON (3.11 to 3.13),
# PIP_ARGS (for every pip install).

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.octavo-ready
TEST_READY := $(VENV)/.octavo-test-ready
CLIENTS := .venv-clients
NODE_CLIENT := tests/clients/openai_node
RELEASE := .venv-release
RELEASE_READY := $(RELEASE)/.octavo-release-ready
CLIENTS_READY := $(CLIENTS)/.octavo-clients-ready
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
TEST_PROCESSES ?= 2
export PIP_ARGS PYTHON

.DEFAULT_GOAL := help
.PHONY: serve test test-clients test-browser test-arm check docs docs-serve reference bench fuzz fuzz-api sanitize torture release lint-deploy try-images clean help

serve: $(READY)  ## set up and serve the embedded model on 127.0.0.1:8000 (ARGS="MODEL --port 9000 ...")
	@exec $(BIN)/octavo serve $(ARGS)

# All tests of a file run in one process, because they share a server or a model. Files run in the order of the folders, whose last
# files are short, so that both processes end at about the same time.
# Compiled files are kept: some hundred processes are started, and each would compile octavo anew.
test: $(TEST_READY)  ## set up and run the tests (PYTEST_ARGS="tests/schedule -x")
	@PYTHONDONTWRITEBYTECODE= exec $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# The server runs in its own environment; the conftest.py of the other tests is not loaded, because it imports torch.
test-clients: $(READY) $(CLIENTS_READY)  ## install third-party API clients and run them against a real server
	@OCTAVO_PYTHON=$(CURDIR)/$(BIN)/python exec $(CLIENTS)/bin/python -m pytest --confcutdir=tests/clients \
		-p no:cacheprovider -W ignore tests/clients $(PYTEST_ARGS)

test-browser: $(TEST_READY)  ## test the cockpit and the playground in the system's chromium (screenshots: build/screenshots)
	@$(BIN)/python -c "import playwright" 2>/dev/null || $(BIN)/python -m pip install -q $(PIP_ARGS) playwright
	@exec $(BIN)/python -m pytest -rs tests/browser $(PYTEST_ARGS)

test-arm: $(TEST_READY)  ## compile the native kernels for aarch64 and run them in an emulator (needs g++-aarch64-linux-gnu and qemu-user)
	@OCTAVO_TEST_ARM=1 exec $(BIN)/python -m pytest -rs -m arm tests/kernels $(PYTEST_ARGS)

# mypy takes as long as all others together, and one core: it runs beside them.
check: $(TEST_READY)  ## linter, formatter, type checker, architecture, documentation, sizes
	@mkdir -p build; $(BIN)/mypy >build/mypy.log 2>&1 & mypy=$$!; \
	( echo "── ruff" && $(BIN)/ruff check && $(BIN)/ruff format --check && \
	echo "── architecture" && $(BIN)/python -m pytest -q tests/test_architecture.py && \
	echo "── reference" && $(BIN)/python -m scripts.reference --check && \
	echo "── sizes" && $(BIN)/python -m scripts.sizes && \
	echo "── docs" && $(MKDOCS) build --strict --quiet ); others=$$?; \
	wait $$mypy; types=$$?; echo "── mypy"; cat build/mypy.log; [ $$types -eq 0 ] && [ $$others -eq 0 ]

docs: $(TEST_READY)  ## build the documentation: build/site/index.html
	@$(MKDOCS) build --strict --quiet
	@echo "build/site/index.html"

docs-serve: $(TEST_READY)  ## show the documentation on 127.0.0.1:8001 and rebuild it as files change
	@$(MKDOCS) serve --dev-addr 127.0.0.1:8001

reference: $(TEST_READY)  ## write the generated pages of docs/ anew
	@$(BIN)/python -m scripts.reference

bench: $(READY)  ## host time per step, and 32 concurrent requests against sequential ones
	@$(BIN)/python benchmarks/host_step.py
	@$(BIN)/octavo bench throughput --compare-sequential $(ARGS)

fuzz-api: $(TEST_READY)  ## run schemathesis against a real server on a tiny model (ARGS="--max-examples 500 --document other.json")
	@[ -x .venv-fuzz/bin/schemathesis ] || { $${PYTHON:-python3} -m venv .venv-fuzz && .venv-fuzz/bin/pip install -q $(PIP_ARGS) 'schemathesis>=4'; }
	@$(BIN)/python -m scripts.fuzz_api --schemathesis .venv-fuzz/bin/schemathesis $(ARGS)

fuzz: $(TEST_READY)  ## fuzz every parser of foreign bytes, guided by coverage (ARGS="--only gguf,schema --cases 50000")
	@$(BIN)/python -m benchmarks.fuzz $(ARGS)

sanitize: $(TEST_READY)  ## run the native kernels' tests under AddressSanitizer and UBSan (some minutes; ARGS="tests/kernels/…")
	@$(BIN)/python scripts/sanitize.py $(ARGS)

torture: $(READY)  ## kill, freeze, starve and attack a real server, and report what clients saw (ARGS="--only kill_engine", ARGS="hostile")
	@$(BIN)/python -m benchmarks.torture $(ARGS)

# The packages that build a release have an environment of their own, without torch.
release: $(RELEASE_READY)  ## build sdist and wheels into dist/, and test them in a clean environment (ARGS="--no-install")
	@$(RELEASE)/bin/python -m scripts.release $(ARGS)

lint-deploy: $(TEST_READY)  ## lint Dockerfiles, scripts, the systemd unit, compose, Prometheus and Grafana files
	@$(BIN)/python -m pytest -q tests/test_deploy.py

try-images:  ## run the steps of the Dockerfiles in debootstrap roots and test the result (needs root; IMAGE=cuda)
	@bash scripts/try_images.sh $(or $(IMAGE),cpu)

clean:  ## remove the virtual environment, caches and build outputs
	@rm -rf $(VENV) .venv-fuzz .fuzz $(CLIENTS) $(RELEASE) $(NODE_CLIENT)/node_modules build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis octavo/kernels/cpu/native-*
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

$(CLIENTS_READY): tests/clients/requirements.txt $(NODE_CLIENT)/package.json | $(READY)
	@$(BIN)/python -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r tests/clients/requirements.txt
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-package-lock --prefix $(NODE_CLIENT); \
		else echo "npm is not installed: the tests of openai for Node are skipped" >&2; fi
	@touch $@

$(RELEASE_READY): Makefile
	@$${PYTHON:-python3} -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) build twine 'auditwheel>=6'
	@touch $@

$(READY): pyproject.toml setup.py
	@bash scripts/setup.sh $(VENV) .
	@touch $@

$(TEST_READY): pyproject.toml setup.py
	@bash scripts/setup.sh $(VENV) '.[test,docs]'
	@touch $(READY) $@
