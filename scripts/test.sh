#!/usr/bin/env bash
# All checks, then all tests. Installs into .venv on the first run; arguments go to pytest:
#   ./scripts/test.sh -m slow        ./scripts/test.sh tests/job_server -k placement
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
ensure_venv dev
cd "$root"
PATH="$root/.venv/bin:$PATH" ./scripts/check.sh
exec "$python" -m pytest "$@"
