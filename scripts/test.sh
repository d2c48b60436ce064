#!/usr/bin/env bash
# The tests. Installs into .venv on the first run.
#   ./scripts/test.sh           all checks, then all tests but the long forms: the fast ones first
#   ./scripts/test.sh --fast    the tests that start no process and load no framework: under a minute
#   ./scripts/test.sh --rest    the other ones
#   ./scripts/test.sh --slow    the long forms, which nothing runs by itself
# Other arguments go to pytest, which then runs one test after the other:
#   ./scripts/test.sh tests/job_server -k placement
# $EDL_TEST_WORKERS (3) tests run at a time: most of them wait for processes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
ensure_venv dev
cd "$root"

# run_tests ARGS...: several at a time; the tests of a file share what is dear to start.
run_tests() {
    "$python" -m pytest -n "${EDL_TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder "$@"
}

case "${1:-}" in
    --fast) run_tests -m fast "${@:2}" ;;
    --rest) run_tests -m "not fast and not slow" "${@:2}" ;;
    --slow) "$python" -m pytest -m slow "${@:2}" ;;
    "")
        PATH="$root/.venv/bin:$PATH" ./scripts/check.sh
        run_tests -m fast
        run_tests -m "not fast and not slow"
        ;;
    *) "$python" -m pytest "$@" ;;
esac
