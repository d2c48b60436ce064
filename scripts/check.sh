#!/usr/bin/env bash
# Lint, formatting, types and import contracts. Uses the python of the caller's environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python -m ruff check .
python -m ruff format --check .
python -m mypy
lint-imports
