#!/usr/bin/env bash
# The tests. Installs into .venv on the first run.
#   ./scripts/test.sh           all checks, then all tests but the heavy and the long: 7 minutes
#   ./scripts/test.sh --fast    the tests that start no process and load no framework: a minute
#   ./scripts/test.sh --all     all tests but the long forms, without the checks, as CI runs them
#   ./scripts/test.sh --slow    the long forms, which nothing runs by itself
# Other arguments go to pytest, which then runs one test after the other:
#   ./scripts/test.sh tests/job_server -k placement
# $EDL_TEST_WORKERS (6) tests run at a time: most of them wait for processes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
ensure_venv dev
cd "$root"

# The tests start some thousand Python processes: what these import is compiled once, not in each.
unset PYTHONDONTWRITEBYTECODE

# Databases and checkpoints are synced at each write, and the tests wait for a disk longer than for
# the processor. In memory they do not, where there is room, and programs may be started from there.
if [ "$(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1 || echo 0)" -gt $((4 << 20)) ] &&
    ! grep -q '^[^ ]* /dev/shm .*noexec' /proc/mounts; then
    export PYTEST_DEBUG_TEMPROOT="${PYTEST_DEBUG_TEMPROOT:-/dev/shm}"
fi

# run_tests ARGS...: several at a time. Each worker begins at another place, so that those that wait
# run beside those that compute; the tests of a file, which share what is dear to start, stay
# together until a worker that has no more takes over the last of another's.
run_tests() {
    "$python" -m pytest -n "${EDL_TEST_WORKERS:-6}" --dist worksteal "$@"
}

case "${1:-}" in
    --fast) run_tests -m fast "${@:2}" ;;
    --all) run_tests "${@:2}" ;;
    --slow) "$python" -m pytest -m slow "${@:2}" ;;
    "")
        PATH="$root/.venv/bin:$PATH" ./scripts/check.sh
        run_tests -m "not slow and not heavy"
        ;;
    *) "$python" -m pytest "$@" ;;
esac
