PYTHON = .venv/bin/python

.PHONY: setup demo test lint bench

setup:
	@tools/setup.sh

demo: setup
	@$(PYTHON) -m bench demo

test: setup
	$(PYTHON) -m pytest

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

bench: setup
	$(PYTHON) -m bench compare --model assets/tiny-step3p5 --batch 1,4,16 --json results/compare.json --plot results/compare.png
	$(PYTHON) -m bench cost --json results/cost.json --plot results/cost.svg
	$(PYTHON) -m pytest bench/micro --benchmark-only --benchmark-columns=median,iqr,rounds --benchmark-sort=name
