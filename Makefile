PYTHON = .venv/bin/python
# What a process imports it compiles for all that come later: a third of the tests' time would go into that else, and
# images of containers tend to forbid it. Empty is as good as not set.
export PYTHONDONTWRITEBYTECODE =

.PHONY: setup demo test lint bench

setup:
	@tools/setup.sh

demo: setup
	@$(PYTHON) -m bench demo

# Two at a time, a file at a time: most of a test is an engine that starts, and engines are shared within a file.
test: setup
	$(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

bench: setup
	$(PYTHON) -m bench compare --model assets/tiny-step3p5 --batch 1,4,16 --json results/compare.json --plot results/compare.png
	$(PYTHON) -m bench cost --json results/cost.json --plot results/cost.svg
	$(PYTHON) -m pytest bench/micro --benchmark-only --benchmark-columns=median,iqr,rounds --benchmark-sort=name
