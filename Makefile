# make run: the main job on the embedded default     make demo: teach a skill, keep the others     make study: the whole study     make test: the test suite     make setup: .venv
PYTHON ?= python3
OLDEST_PYTHON ?= python3.10
BIN := .venv/bin
OUT ?= runs/mini
METHODS := seq-lora,sfor,o-lora,o-lora-hard
SEED := 42

TUNED := ewc lwf n-lora sd-lora o-lora-bsr o-lora-bsr-strong
RECIPE ?= mini
STUDY ?= runs/study
STUDIED ?= all
WITH ?=

DEMO := --set chat_template=tools/mini/chat_template.jinja --set learning_rate=1e-3 --set epochs=2 --set threads=1

.PHONY: setup run demo study test test-all test-oldest test-stack test-engines faults lint types mutants bench docs site tables release clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lab]'
	touch $@

.venv/.test-ready: .venv/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,lint,docs]'
	touch $@

run: setup
	$(BIN)/anchorlora grid mini --methods $(METHODS) --orders order1 --seeds $(SEED) --set batching=packed --out $(OUT)
	$(BIN)/anchorlora report $(OUT) --out $(OUT)/report

# teach the embedded model one skill from a chat file and keep what it can do, beside an unprotected twin; about a minute
demo: setup
	$(BIN)/python tools/mini/make_demo.py runs/demo-data
	$(BIN)/anchorlora train embedded:mini --data runs/demo-data/chat.jsonl --test runs/demo-data/chat-test.jsonl --name news \
		--keep runs/demo-data/abilities.jsonl --compare --out runs/demo $(DEMO)

# the whole study: strengths on a holdout, every method x 3 orders x 3 seeds, the trace, the report; called again: what is missing
# elsewhere than on mini, say: make study RECIPE=qwen3-8b STUDY=runs/8b WITH='--data data/cl'; fewer methods: STUDIED=sfor,o-lora TUNED=
study: setup
	for method in $(TUNED); do \
		$(BIN)/anchorlora select $(RECIPE) --method $$method --out $(STUDY)/select/$$method $(WITH) || exit $$?; \
	done
	$(BIN)/anchorlora grid $(RECIPE) --methods $(STUDIED) --out $(STUDY)/grid $(WITH) $(TUNED:%=--selection $(STUDY)/select/%)
	$(BIN)/anchorlora trace $(RECIPE) --out $(STUDY)/trace $(WITH)
	$(BIN)/anchorlora report $(STUDY)/grid $(STUDY)/trace --out $(STUDY)/report

# the tests and the examples of the docstrings; where the environment forbids bytecode, every call would rewrite all tests anew
test test-all: export PYTHONDONTWRITEBYTECODE :=
test: .venv/.test-ready
	$(BIN)/python -m pytest -n 2 --dist loadscope -m 'not slow and not engines' --doctest-modules tests src

test-all: .venv/.test-ready
	$(BIN)/python -m pytest -n 2 -m 'not engines' --doctest-modules tests src

# the short suite on the lower bounds of pyproject.toml, by the oldest Python; torch 2.7 of an index is a build for CUDA of some gigabytes:
# PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS may name a place that has one for the CPU. Proven so on Linux x86-64; not tried: macOS, Windows
test-oldest: .venv-oldest/.ready
	.venv-oldest/bin/python -m pytest -n 2 --dist loadscope -m 'not slow and not engines' --doctest-modules tests src

.venv-oldest/.ready: pyproject.toml constraints-oldest.txt
	$(OLDEST_PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[test]'
	touch $@

# the short suite beside the pins of another stack, by the Python of its environment: make test-stack STACK=ENV/bin/python
# once before: ENV/bin/pip install --editable '.[lab]' pytest pytest-xdist hypothesis; tests of what is missing are skipped by name
test-stack:
	$(STACK) -m pytest -n 2 --dist loadscope -p no:anyio -m 'not slow and not engines' tests

# the engines on real daemons, some killed: ANCHORLORA_SLURM=SCRIPT starts and stops slurmctld and slurmd (`SCRIPT FOLDER start|stop`); two raylets need Ray
test-engines: .venv/.test-ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m pytest -ra tests/engines

# stopped, killed, damaged and refused: the long form, and what it counted into docs/lab/reliability.md; about an hour
faults: .venv/.test-ready
	rm -f .faults.jsonl
	ANCHORLORA_FAULTS=$(CURDIR)/.faults.jsonl $(BIN)/python -m pytest -n 2 -q tests/faults
	$(BIN)/python tools/fill_reliability.py .faults.jsonl
	rm .faults.jsonl

# mutants by cosmic-ray of scores, geometry, constraints and measurement; goes on where the last call stopped (.mutants)
# a part of the files: make mutants ONLY='low_rank scores'; survivors once more: ONLY=--again; the table and the survivors: ONLY=--report
mutants: .venv/.test-ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[mutation]'
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutants.py $(ONLY)

lint: .venv/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.test-ready
	$(BIN)/mypy

bench: .venv/.test-ready
	$(BIN)/python -m benchmarks

# what is measured in README.md, docs/package.md and docs/figures; `make site` writes it into all other pages
docs: setup
	$(BIN)/python tools/built_pages.py
	$(BIN)/python tools/concept_figures.py

# README, docs/, the docstrings and the records of results/ as a site in build/site; a broken link or a missing name is an error
site: .venv/.test-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# the tables of docs/supported.md from the results of their tests
tables: .venv/.test-ready
	rm -f .tables.jsonl
	ANCHORLORA_TABLES=$(CURDIR)/.tables.jsonl $(BIN)/python -m pytest -n 2 -q tests/loops tests/guards tests/architectures
	$(BIN)/python tools/fill_tables.py .tables.jsonl
	rm .tables.jsonl

# the release of a tag: every check with the long tests, dist/, a fresh environment, hashes; uploads nothing: make release TAG=v0.1.0
release: .venv/.test-ready
	$(BIN)/python tools/release.py $(TAG) $(ONLY)

clean:
	rm -rf .venv .venv-oldest build dist runs
