PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
RUNNABLE := .venv/.runnable
CHECK_PYTHON := $(PYTHON) -c 'import sys; sys.exit("tokenbus needs Python 3.11 or newer: make PYTHON=python3.12 …" if sys.version_info < (3, 11) else 0)'

.PHONY: setup demo up test e2e test-integrations test-clients test-docker model fuzz chaos simulate-faults soak idle crowd upgrade-test release check lint types schemas docs screenshots bench simulate clean

setup: $(INSTALLED)

# Everything that tests and checks need.
$(INSTALLED): requirements/development.lock pyproject.toml
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --requirement requirements/development.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@ $(RUNNABLE)

# Only what the bus needs to run on this machine: a fifth of that.
$(RUNNABLE): requirements/demo.lock pyproject.toml
	@$(CHECK_PYTHON)
	@echo "installing into .venv: about a minute"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --requirement requirements/demo.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(RUNNABLE)
	$(BIN)/tokenbus demo

# With the mock provider too: MOCK=1
up: $(RUNNABLE)
	$(BIN)/tokenbus up $(if $(MOCK),--mock)

# Most tests wait for their processes, so several run at once, each with its own server: JOBS=
# KEEP=1 writes what each file took to tests/seconds.json: CPU seconds, the budget, and seconds without other load.
test: setup
	$(BIN)/python -m tests.run -n $(or $(JOBS),8) $(if $(KEEP),--keep-seconds)

# The end-to-end tests alone. CHAINED=1: through one process for fetcher, normalizer and parser
e2e: setup
	$(if $(CHAINED),TESTS_CHAINED=1) $(BIN)/python -m tests.run -n $(or $(JOBS),8) tests/e2e

# The frameworks of voice agents and of workflows are large, so they have an environment of their own.
test-integrations: setup build/integrations/.installed
	$(BIN)/pyright --pythonpath build/integrations/bin/python --project tests/integrations
	build/integrations/bin/python -m pytest -W ignore::DeprecationWarning tests/integrations

# Agent libraries and command lines, checkers of providers and conformance suites at the gateway. KEEP=1 writes the table of
# clients in docs/guides/gateway.md anew. Some libraries cannot use the newest SDKs yet: they have an environment of their own.
CLIENT_SUITES := build/clients
CLIENT_SUITES_BEFORE := build/clients-before
build/%/.installed: requirements/%.lock pyproject.toml
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv build/$*
	build/$*/bin/pip install --quiet --requirement requirements/$*.lock
	build/$*/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

test-clients: setup $(CLIENT_SUITES)/.installed $(CLIENT_SUITES_BEFORE)/.installed
	$(BIN)/pyright --pythonpath $(CLIENT_SUITES)/bin/python --project tests/more_clients
	CLIENTS=1 $(BIN)/python -m pytest tests/more_clients/test_table.py
	CLIENTS=1 $(CLIENT_SUITES_BEFORE)/bin/python -m pytest -W ignore tests/more_clients/test_table.py
	CLIENTS=1 CLIENTS_CLI=1 PATH="$(CURDIR)/$(CLIENT_SUITES)/bin:$$PATH" $(CLIENT_SUITES)/bin/python -m pytest -W ignore tests/more_clients

test-docker: setup
	$(BIN)/python -m pytest -m docker

# Random histories of the protocol against the real scripts, in any number: EXAMPLES=
model: setup
	MODEL_EXAMPLES=$(or $(EXAMPLES),2000) $(BIN)/python -m pytest tests/model -k "random_histories or one_fate or one_order"

# Coverage-guided, on the provider decoders. If atheris cannot be installed, it says so and stops.
fuzz: setup
	@$(BIN)/pip install --quiet --disable-pip-version-check atheris 2>/dev/null || true
	$(BIN)/python -m tests.fuzz $(or $(SECONDS),60)

# Runs through real workers while everything breaks; a judge checks the output: SECONDS=600 SEED= BROKEN= KEEP= FAULTS=
chaos: setup
	$(BIN)/python -m tests.chaos --seconds $(or $(SECONDS),600) --seed "$(SEED)" \
		$(if $(BROKEN),--broken $(BROKEN)) $(if $(KEEP),--keep $(KEEP)) $(if $(FAULTS),--faults "$(FAULTS)")

# The services in virtual time under faults, seed by seed; a seed that went wrong is printed with its fewest faults: SEEDS= SECONDS=
# SEED= FAULTS= NUMBERS= FLEET= KEEP=; without each guard of scripts in turn, whose table in chaos.md it writes: GUARDS=commit
simulate-faults: setup
	$(BIN)/python -m tests.simulated_faults --seeds $(or $(SEEDS),100) --seed $(or $(SEED),1) \
		--fleet $(or $(FLEET),any) --faults "$(FAULTS)" --numbers "$(NUMBERS)" \
		$(if $(SECONDS),--seconds $(SECONDS)) $(if $(KEEP),--keep "$(KEEP)") $(if $(GUARDS),--guards "$(GUARDS)")

# A steady, mixed load for half an hour at half of the machine's capacity; fails if a resource grows: SECONDS= SHARE= KEEP=
soak: setup
	$(BIN)/python -m tests.soak --seconds $(or $(SECONDS),1800) --share $(or $(SHARE),0.5) $(if $(KEEP),--keep $(KEEP))

# Silent clients of every protocol of the gateway: each gets only keep-alives, and no resource grows: SECONDS= CLIENTS=
idle: setup
	$(BIN)/python -m tests.soak.idle --seconds $(or $(SECONDS),3600) --clients $(or $(CLIENTS),2000)

# The previous release and this one together; replaces each kind of worker and back, many times: ROUNDS= RUNS=
upgrade-test: setup
	UPGRADE_ROUNDS=$(or $(ROUNDS),20) UPGRADE_RUNS=$(or $(RUNS),20) $(BIN)/python -m pytest --timeout 3600 tests/e2e/operating/test_upgrade.py

# Live clients of every protocol while gateways are killed: CLIENTS=200
crowd: setup
	CLIENTS=$(or $(CLIENTS),200) $(BIN)/python -m pytest -s --timeout 600 tests/e2e/gateway/test_crowd.py

# Checks whether a release can be made; with DO=1, makes it: VERSION=
release: setup
	$(BIN)/python -m maintenance.releasing $(VERSION) $(if $(DO),--do)

check: lint types

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python clients/typescript/scripts/generate_types.py --check

types: setup
	$(BIN)/pyright

# The JSON Schemas in the wheel, and the types of the client for Node.
schemas: setup
	$(BIN)/python clients/typescript/scripts/generate_types.py

# The documentation site, in build/site, with every link checked.
docs: setup
	$(BIN)/python -m maintenance.docsite

# The console's pictures in docs/images, of a real bus with the mock provider, in the machine's Chromium.
screenshots: setup
	$(BIN)/python -m tests.console.screenshots

bench: setup
	$(BIN)/python -m tests.bench $(if $(README),--readme)

# Computes what larger deployments need, from a model with measured unit costs.
simulate: setup
	$(BIN)/python -m tests.simulation

clean:
	rm -rf .venv dist build .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find shared services tests -name __pycache__ -type d -prune -exec rm -rf {} +
