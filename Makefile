# The commands a newcomer needs: make demo, make test. Both make the environment first.
VENV ?= .venv
BIN := $(VENV)/bin
.PHONY: demo test test-full lint format env clean gc lock bench help

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make demo       run the demo study (about 15 minutes on 2 cores); shows a table at the end
demo: env
	@$(BIN)/python scripts/demo.py

## make test       unit, DAG and end-to-end tests (about 8 minutes on 2 cores)
test: env
	@$(BIN)/python -m pytest -q tests

## make test-full  the same and the longer checks (2 minutes more)
test-full: env
	@$(BIN)/python -m pytest -q tests --full

## make lint       ruff, snakefmt, mypy
lint: env
	@$(BIN)/ruff check scripts tests
	@$(BIN)/ruff format --check scripts tests
	@$(BIN)/snakefmt --check Snakefile rules
	@$(BIN)/mypy

## make format     let ruff and snakefmt rewrite the code
format: env
	@$(BIN)/ruff check --fix scripts tests
	@$(BIN)/ruff format scripts tests
	@$(BIN)/snakefmt Snakefile rules

## make bench      efficiency: our stages against bare vLLM, the dry run of a large study
bench: env
	@$(BIN)/python scripts/bench.py
	@$(BIN)/python scripts/bench_plan.py

## make gc         list stored parts that the configuration does not use (GC=--remove removes them)
gc: env
	@$(BIN)/python scripts/gc.py $(GC)

## make clean      remove tables, figures, links and logs; the store stays
clean:
	@rm -rf results/tables results/figures results/current results/logs results/report.html results/index.csv

## make lock       resolve the pinned environments anew
lock:
	@bash envs/lock.sh

env:
	@bash envs/install.sh "$(VENV)"
