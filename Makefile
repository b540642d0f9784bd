# Cubelet. `make` or `make help` lists what can be made.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The root directory of the node that run, stop and clean act on.
export CUBELET_ROOT ?= /var/lib/cubelet
# A Go in /usr/local is found without a login shell; go.mod's version is fetched when
# the installed Go is older.
export PATH := $(PATH):/usr/local/go/bin:/usr/local/sbin:/usr/sbin:/sbin
export GOTOOLCHAIN := $(or $(CUBELET_GOTOOLCHAIN),auto)

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
COMMIT  := $(shell git rev-parse --short=12 HEAD 2>/dev/null)
STATIC  := CGO_ENABLED=0 go build -trimpath -ldflags '-s -w -X main.version=$(VERSION) -X main.commit=$(COMMIT)'
SHIM    := github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2
TOOL    := go tool -modfile=tools/go.mod
TEST    ?= ./...

.PHONY: run
run: ## Start a node here, build the template `base`, run a program in a MicroVM (as root)
	@scripts/run

.PHONY: stop
stop: ## Delete the sandboxes and stop the node (KEEP=1: leave the sandboxes running)
	@scripts/stop

.PHONY: clean
clean: ## Stop the node, remove all of it, and remove what was built
	@scripts/purge
	@rm -rf bin build

.PHONY: build
build: ## Build all programs, static, into bin/
	@mkdir -p bin
	@$(STATIC) -o bin/ ./cmd/... $(SHIM)

.PHONY: deps
deps: ## Install what building, testing and running need (Debian 12 or 13, as root)
	@scripts/install-deps

.PHONY: test
test: deps ## Run all tests, real MicroVMs included (as root; TEST=./internal/... for some)
	@scripts/test $(TEST)

.PHONY: test-race
test-race: deps ## Run the tests that need no root under the race detector
	@scripts/test-race

.PHONY: fuzz-short
fuzz-short: ## Run every fuzz target for FUZZTIME (10s)
	@scripts/fuzz $(or $(FUZZTIME),10s)

.PHONY: bench
bench: build ## Measure create, exec and delete; compare with runc (as root)
	@scripts/bench

.PHONY: check
check: ## Format, vet, lint, import directions, generated code, scripts
	@scripts/check

.PHONY: gen
gen: ## Generate code from the API definition, docs/states.md from the phase table
	@$(TOOL) buf generate
	@go run ./internal/gendocs

.PHONY: format
format: ## Format all Go code
	@$(TOOL) gofumpt -w $$(git ls-files '*.go' | grep -v -E '\.pb\.go$$|\.connect\.go$$')

.PHONY: help
help: ## Show this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS=$$'\t' read -r name text; do printf '  make %-11s %s\n' "$$name" "$$text"; done
