.DEFAULT_GOAL := help
VENV ?= .venv
TEST_STREAMS ?= 2
export CARRYOVER_VENV := $(VENV)

.PHONY: help setup doctor demo test bench lint clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv with everything (CPU build of vLLM)
	@infra/setup.sh cpu

doctor: setup ## check this machine
	@$(VENV)/bin/platform doctor

demo: setup ## the whole pipeline on the embedded target, in minutes
	@$(VENV)/bin/platform demo

test: setup ## all tests; PYTEST_ARGS="-k name" for some, TEST_STREAMS=0 for one after the other
	@$(VENV)/bin/python -m carryover.guardian $(VENV)/bin/python -m pytest \
		-n $(TEST_STREAMS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

bench: setup ## what our own parts cost, in one table of ratios; BENCH_ARGS="--only plugin" for some
	@$(VENV)/bin/python -P -m carryover.bench.parts $(BENCH_ARGS)

lint: setup ## style checks
	@$(VENV)/bin/ruff check .

clean: ## remove caches (not .venv, not runs/)
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis platform/*.egg-info
