# One word per task; `make` alone lists them. All set-up is done by .ci/setup, which each task runs first.
# PYTHON=/path/to/python3 chooses the interpreter of .venv.

.PHONY: help demo test coverage tools dali bench soak kernels docs setup lint format house rooms constraints clean
.DEFAULT_GOAL := help
.SILENT:
export PYTHON

BIN := .venv/bin

help:  ## show this list
	sed -n 's/^\([a-z]*\):[^#]*##  *\(.*\)/make \1\t\2/p' Makefile | expand -t 20

demo: setup  ## mount a set of real images and look around in it
	$(BIN)/python .ci/demo.py

# The tests run also when lint complains, and their summary comes last. Three processes run them also on two
# processors, since a part of their time is waiting for others. Those of other people's tools are skipped where
# `make tools` has not been typed, but not with WDSFS_REQUIRE_TOOLS.
test:  ## every check: lint, format, types, tests, ten minutes; ROOM=tar runs the tests of one room only
	.ci/setup test
	$(if $(WDSFS_REQUIRE_TOOLS),.ci/setup tools)
	status=0; \
	$(MAKE) --no-print-directory lint || status=1; \
	echo '==> Tests'; \
	$(BIN)/pytest -n 3 --dist worksteal $(if $(ROOM),tests/$(ROOM)) || status=1; \
	exit $$status

coverage: setup  ## the share of lines that tests without mounts and other programs run, in their own process
	$(BIN)/coverage run --source=wdsfs --data-file=build/coverage -m pytest -q -m 'not fuse and not tools and not dali'
	$(BIN)/coverage report --data-file=build/coverage --sort=cover

tools:  ## the tools and servers that some tests and docs/how-to/loaders.md use, 2 GB; `make test` then runs these, too
	.ci/setup tools

dali: setup  ## the tests with NVIDIA DALI, which no other task runs; another gigabyte
	.ci/setup dali
	WDSFS_REQUIRE_TOOLS=1 $(BIN)/pytest -m dali

bench:  ## wdsfs against its peers, half an hour; BENCH='--tiny' and the like are its options
	.ci/setup bench
	build/bench-venv/bin/python -m bench $(BENCH)

soak: setup  ## readers, edits, commits, growth, remote shards and kills at once; DURATION=3600 seconds; build/soak
	$(BIN)/python -m bench.soak $(or $(DURATION),3600) build/soak

kernels: setup  ## the smoke suite on Debian's kernel, in an emulated machine; KERNEL=linux-image-... is another package
	.ci/setup kernels
	$(BIN)/python -m venv --clear build/kernel
	build/kernel/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt .
	$(BIN)/python .ci/kernels.py build/kernel/bin/python $(or $(KERNEL),linux-image-cloud-amd64)

docs:  ## the site of the documents, in build/site, with search; links and anchors are checked
	.ci/setup docs
	build/docs-venv/bin/python .ci/site.py

setup:  ## what is needed to build, mount and develop: Debian packages by sudo, .venv with wdsfs, pytest, ruff, mypy
	.ci/setup

lint: setup  ## ruff's rules and format, mypy's strict types
	echo '==> Lint, format, types'
	status=0; \
	for check in 'ruff check' 'ruff format --check' mypy; do $(BIN)/$$check || status=1; done; \
	exit $$status

format: setup  ## let ruff lay the code out and mend what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

house: setup  ## sizes of the code, its rooms (packages) and what they import; HOUSE=-v names them
	$(BIN)/python .ci/house.py $(HOUSE)

rooms: setup  ## the modules of each room, each with the first sentence of its docstring
	$(BIN)/python .ci/house.py rooms

constraints:  ## choose the newest versions for development anew; the oldest Python decides
	new=$$(mktemp -d) && trap 'rm -rf "$$new"' EXIT && \
	$(or $(PYTHON),python3.11) -m venv "$$new" && \
	"$$new/bin/pip" install --quiet --disable-pip-version-check '.[dev]' && \
	{ grep '^#' constraints.txt; "$$new/bin/pip" freeze --exclude wdsfs; } >"$$new/constraints.txt" && \
	cp "$$new/constraints.txt" constraints.txt && \
	"$$new/bin/pip" install --quiet --disable-pip-version-check uv && \
	{ grep '^#' packaging/requirements.txt; "$$new/bin/uv" pip compile --quiet pyproject.toml \
	  --extra compressed --extra hf --extra view --constraint constraints.txt --generate-hashes --universal \
	  --python-version 3.11 --no-header --no-annotate; } >"$$new/requirements.txt" && \
	cp "$$new/requirements.txt" packaging/requirements.txt

clean:  ## remove .venv and everything that the tools left
	rm -rf .venv build dist .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
