# What people and CI type. `make` alone lists it; VENV names the environment that is used.
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help install lint format types prose size site check fast test soak packages ci

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

# No process with torch but pytest's, no browser, no compiled kernel: a minute on two cores.
FAST := $(addprefix tests/,planner cache pml cost openai/test_schema.py openai/test_chunks.py \
  $(patsubst %,engine/test_%.py,backlog contained detokenize grammar_lanes loop mutations pml_plans room \
    salts scheduler seeds symbolic throttle tokenizer) \
  $(patsubst %,ops/test_%.py,attention checks layers noise unpacking) \
  $(patsubst %,batch/test_batch_%.py,format inputs) \
  $(patsubst %,models/test_models_%.py,config find shapes) \
  $(patsubst %,test_%.py,advice beside_vllm needs options scores tree))

fast: ## what to run after each change: a minute
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(FAST)

test: ## all checks and tests, in a fresh environment
	scripts/test

soak: ## the tests that CI leaves out: a quarter of an hour more
	OMP_NUM_THREADS=1 ONESTEM_EXPECT_EMULATED=1 $(BIN)/python -m pytest -m soak -n 2 --dist worksteal

packages: ## build sdist and wheel into dist/, and try both
	scripts/packages

ci: ## what CI runs: test and packages, which are built beside the checks
	ONESTEM_PACKAGES=dist scripts/test
