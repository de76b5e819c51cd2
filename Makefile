# make run: the main job on the embedded default     make test: the test suite     make setup: .venv alone
PYTHON ?= python3
BIN := .venv/bin
OUT ?= runs/mini
METHODS := seq-lora sfor o-lora o-lora-hard
SEED := 42

.PHONY: setup run test test-all lint types bench docs clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/.test-ready: .venv/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,lint]'
	touch $@

run: setup
	for method in $(METHODS); do \
		$(BIN)/anchorlora run mini --method $$method --order order1 --seed $(SEED) --out $(OUT)/$$method || exit $$?; \
	done
	$(BIN)/anchorlora report $(OUT) --to $(OUT)/report

test: .venv/.test-ready
	$(BIN)/python -m pytest -n 2 -m 'not slow'

test-all: .venv/.test-ready
	$(BIN)/python -m pytest -n 2

lint: .venv/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.test-ready
	$(BIN)/mypy

bench: .venv/.test-ready
	$(BIN)/python -m benchmarks

docs: setup
	$(BIN)/anchorlora methods > docs/methods.md
	$(BIN)/python tools/fill_readme.py

clean:
	rm -rf .venv build dist runs
