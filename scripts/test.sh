#!/usr/bin/env bash
# All checks, then all tests, two at a time: most of them wait for processes. Installs into .venv on
# the first run. Arguments go to pytest, which then runs one test after the other:
#   ./scripts/test.sh -m slow        ./scripts/test.sh tests/job_server -k placement
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
ensure_venv dev
cd "$root"
PATH="$root/.venv/bin:$PATH" ./scripts/check.sh
[ $# -gt 0 ] || set -- -n "${EDL_TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder
exec "$python" -m pytest "$@"
