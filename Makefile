# The commands a newcomer needs: make demo, make test. Both make the environment first.
VENV ?= .venv
BIN := $(VENV)/bin
.PHONY: demo test test-full test-slurm lint format env clean gc lock bench prefetch status help
STUDY ?= config/config.yaml

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make demo       run the demo study (about 15 minutes on 2 cores); shows a table at the end
demo: env
	@$(BIN)/python scripts/demo.py

## make test       unit, DAG and end-to-end tests (about 13 minutes on 2 cores)
test: env
	@$(BIN)/python -m pytest -q tests

## make test-full  the same and the longer checks (2 minutes more)
test-full: env
	@$(BIN)/python -m pytest -q tests --full

## make test-slurm installs a Slurm (root, Debian) and runs the workflow on it (6 minutes)
test-slurm: env
	@$(BIN)/python tests/slurm/cluster.py install || [ $$? -eq 3 ]
	@$(BIN)/python -m pytest -q --slurm tests

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

## make bench      efficiency: our stages against bare vLLM, training against Speculators', a large dry run, large tables
bench: env
	@$(BIN)/python scripts/bench.py
	@$(BIN)/python scripts/bench_plan.py
	@$(BIN)/python scripts/bench_tables.py
	@$(BIN)/python scripts/bench_training.py

## make prefetch   list what a study needs from outside, and copy what is missing into the store (STUDY=file)
prefetch: env
	@$(BIN)/python scripts/prefetch.py --fetch --configfile $(STUDY)

## make status     how far a study is, what runs, what failed and why (STUDY=file, the demo by default)
status: env
	@$(BIN)/python scripts/status.py --configfile $(STUDY)

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
