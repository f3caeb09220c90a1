# What a person types. `make` alone lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

# The first Python that is new enough and can make virtual environments; PYTHON=… chooses another. 3.11 comes first, since the
# demo's host is this machine and the CPU profile's lock is for it.
find_python = for p in python3.11 python3 python3.12 python3.13; do \
  if "$$p" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then command -v "$$p"; break; fi; done
PYTHON ?= $(shell $(find_python))

# ansible.cfg is ignored in a directory that everyone may write to, unless it is named
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
export LC_ALL := $(or $(LC_ALL),C.UTF-8)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
bin := .venv/bin
pip_install := $(bin)/python -m pip install -qq --require-hashes
pytest := $(bin)/python -m pytest --timeout 1500
# Whole runs wait for servers two fifths of the time: what shares a host stays in one worker (TOGETHER in tests/conftest.py).
JOBS ?= 2
in_parallel := --numprocesses $(JOBS) --dist loadscope --no-loadscope-reorder

.PHONY: help
help: ## list these targets
	@grep -hE '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/^([a-z0-9-]+):.*## (.*)/\1\t\2/' | expand -t 16

.PHONY: setup
setup: .venv/.controller ## make .venv with what ansible-playbook needs
	@echo "ready: . .venv/bin/activate"

.venv/bin/python:
	@if [ -z "$(PYTHON)" ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing python3-venv"; apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes python3-venv; \
	  fi; fi; \
	python="$(PYTHON)"; [ -n "$$python" ] || python=$$($(find_python)); \
	[ -n "$$python" ] || { echo "No Python 3.11 or later that can make virtual environments. On Debian or Ubuntu: sudo apt-get install python3-venv" >&2; exit 1; }; \
	"$$python" -m venv .venv

.venv/.controller: requirements/controller.txt | .venv/bin/python
	@$(pip_install) -r requirements/controller.txt
	@touch $@

.venv/.dev: requirements/dev.txt .venv/.controller
	@$(pip_install) -r requirements/dev.txt
	@touch $@

.PHONY: demo
demo: .venv/.controller ## deploy, measure and report on this machine, without a GPU and without root
	@$(bin)/ansible-playbook deploy_eagle3.yml
	@echo; echo "The server answers at http://127.0.0.1:$${AERIE_DEMO_PORT:-30000}/v1 (model target) until you type: make stop"
	@echo "To type ansible-playbook yourself: . .venv/bin/activate"

.PHONY: stop
stop: .venv/.controller ## stop the demo's servers
	@$(bin)/ansible-playbook playbooks/stop.yml

.PHONY: test
test: .venv/.dev ## everything below but the longest, JOBS=2 at once; booted test hosts need root
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint sanity
	@if [ "$$(id -u)" = 0 ]; then $(pytest) $(in_parallel) tests; \
	else echo "NOT RUN: tests/targets boots hosts, which needs root: sudo make test-targets"; $(pytest) $(in_parallel) tests -m "not targets"; fi

.PHONY: lint
lint: .venv/.dev ## formatting, lint and types of Python and YAML
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	tools/typecheck.sh
	$(bin)/yamllint --strict .
	PATH="$(CURDIR)/$(bin):$$PATH" $(bin)/ansible-lint --offline

.PHONY: unit
unit: .venv/.dev ## the cores, in seconds
	$(pytest) tests/unit

.PHONY: sanity
sanity: .venv/.dev ## Ansible's own checks of the modules and their documentation
	tools/ansible_sanity.sh

.PHONY: test-contract
test-contract: .venv/.dev ## patch sets against every real SGLang wheel, a download of 800 MB (make test takes some of them)
	$(pytest) tests/contract --wheels=all

.PHONY: faults
faults: .venv/.dev ## the patch engine killed, out of space and lied to at every system call; minutes (make test takes some of them)
	$(pytest) tests/faults --faults=all

.PHONY: adopt-version
adopt-version: .venv/.controller ## what a release of SGLang moved: VERSION=0.5.24 (WRITE=1: add its hashes to the patch sets)
	@[ -n "$(VERSION)" ] || { echo "Say which: make adopt-version VERSION=0.5.24" >&2; exit 2; }
	@$(bin)/python tools/adopt_version.py $(VERSION) $(if $(WRITE),--write)

.PHONY: test-e2e
test-e2e: .venv/.dev ## whole runs on this machine (make test leaves the longest out)
	$(pytest) tests/e2e --long

.PHONY: test-targets
test-targets: .venv/.dev ## whole runs on booted hosts over SSH (make test leaves the longest out); needs root
	$(pytest) tests/targets --long

.PHONY: lock
lock: ## make requirements/*.txt anew (LOCK=--upgrade takes newer versions)
	PYTHON="$(PYTHON)" tools/lock.sh $(LOCK)

.PHONY: clean
clean: ## remove .venv, .cache and other tools' caches; results and the demo's host stay
	@if compgen -G '.cache/targets/state/gpu*' >/dev/null; then tests/targets/booted_hosts.py down; fi
	rm -rf --one-file-system .venv .cache .mypy_cache .pytest_cache .ruff_cache .ansible
	@for kept in results .aerie; do [ ! -e $$kept ] || echo "kept: $$kept"; done
