# `make demo` and `make test` set up their own environment in .venv; PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL := ane_layers/bundled/exaone4-tiny
DEMO := build/demo

.PHONY: demo test setup lint types site check dist clean

$(BIN)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("ane_layers needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

setup: $(BIN)/.ready

demo: $(BIN)/.ready
	mkdir -p $(DEMO)
	$(BIN)/ane-layers convert $(MODEL) -o $(DEMO)/fold.mlpackage --context 512
	$(BIN)/ane-layers convert $(MODEL) -o $(DEMO)/repeat_kv.mlpackage --context 512 --head-sharing repeat_kv
	$(BIN)/ane-layers verify $(DEMO)/fold.mlpackage $(MODEL) --text $(MODEL)/heldout.txt --tokens 256 --gate 60
	$(BIN)/ane-layers agree $(DEMO)/fold.mlpackage $(DEMO)/repeat_kv.mlpackage --tokenizer $(MODEL) --prompts $(MODEL)/prompts.txt
	$(BIN)/ane-layers generate $(DEMO)/fold.mlpackage --tokenizer $(MODEL) --prompt 'And it came to pass in those days, that' --max-new-tokens 80 --temperature 0.7 --top-p 0.9 --seed 3
	@echo
	@echo 'Shown: a small EXAONE 4 became a Core ML package, twice: with folded and with repeated KV heads. Each was read back from its files,'
	@echo 'its operations and tiles counted, and executed; its logits equal those of PyTorch, both write the same tokens, and the text above came'
	@echo 'from the package itself. Not shown: anything about an Apple device. The packages were run by an interpreter; how fast a Neural Engine'
	@echo 'is, and what it takes on, only a device can tell. Nor the published EXAONE 4 weights: the model here is a small one of the same kind.'

test: $(BIN)/.ready
	$(BIN)/python -m pytest -n 2 --dist loadfile
	@echo
	@echo 'Shown: layers and models equal PyTorch and transformers; converted packages, read back from disk and executed by the interpreter, equal'
	@echo 'both. Not shown: speed or placement on an Apple device, and the published EXAONE 4 weights.'

lint: $(BIN)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BIN)/.ready
	$(BIN)/mypy

$(BIN)/.site-ready: $(BIN)/.ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# The documentation in build/site, without a warning. The variable silences a notice about the theme's successor.
site: $(BIN)/.site-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'build/site/index.html'

check: lint types test

# Built twice, the wheel from the sdist each time: different bytes are an error. The date in the archives is that of the last commit.
dist: export SOURCE_DATE_EPOCH := $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2>/dev/null),1577836800)
dist: $(BIN)/.ready
	$(BIN)/pip install --quiet --constraint constraints.txt build
	rm -rf dist build/dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir build/dist .
	cd build/dist && sha256sum * | (cd ../../dist && sha256sum --check --strict)
	rm -rf build/dist
	cd dist && sha256sum *

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
