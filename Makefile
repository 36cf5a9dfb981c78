# What people and CI type. `make` alone lists it; VENV names the environment that is used.
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help install lint format types prose size site check fast test packages ci

help:
	@awk -F': .*## ' '/^[a-z]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: ## make .venv with all that developers need
	scripts/install $(VENV) dev,docs,eval,ray,trl

lint: ## lint, and whether everything is formatted
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: ## format, and mend what lint can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: ## type check
	$(BIN)/mypy

prose: ## check the English of pages, docstrings, helps and errors
	$(BIN)/python scripts/prose

size: ## lines, rooms and arrows, against the budget of pyproject.toml
	$(BIN)/python scripts/size

site: ## build the site into out/site; warnings are errors
	$(BIN)/python scripts/site

check: lint types prose size site ## all that needs no test

test: ## all checks and tests, in a fresh environment
	scripts/test

packages: ## build sdist and wheel into dist/, and try both
	scripts/packages

ci: test packages ## what CI runs
