# Programs in the background, with a pid file and a log in $state. Sourced, after lib.sh.
# shellcheck shell=bash
state="${EDL_STATE_DIR:-$root/edl_run}"

# Prints the start time of a process in clock ticks since boot; nothing if there is none. With the
# pid it names a process for good: a pid alone may be another program's by now.
started_at() {
    local stat
    stat="$(cat "/proc/$1/stat" 2>/dev/null)" || return 0
    stat="${stat##*) }"  # the name before it may contain blanks
    [ "${stat%% *}" = Z ] || cut -d ' ' -f 20 <<<"$stat"
}

# Prints the pid that the pid file $1 names, if that process is alive.
running_pid() {
    local pid="" ticks=""
    [ -r "$1" ] && read -r pid ticks <"$1" || return 0
    [ -n "$ticks" ] && [ "$(started_at "$pid")" = "$ticks" ] && echo "$pid" || return 0
}

# in_background NAME COMMAND...: starts it in a session of its own; its log is $state/NAME.log.
# Leaves its pid in $started_pid.
in_background() {
    local name="$1"
    shift
    setsid "$@" >>"$state/$name.log" 2>&1 </dev/null &
    started_pid=$!
    printf '%s %s\n' "$started_pid" "$(started_at "$started_pid")" >"$state/$name.pid"
}

# stop_background NAME SECONDS: SIGTERM, wait, and after that many seconds say that it still runs.
stop_background() {
    local name="$1" seconds="$2" pid deadline
    pid="$(running_pid "$state/$name.pid")"
    if [ -z "$pid" ]; then
        rm -f "$state/$name.pid"
        say "$name does not run."
        return
    fi
    kill -TERM "$pid" 2>/dev/null || true
    deadline=$((SECONDS + seconds))
    while [ -n "$(running_pid "$state/$name.pid")" ]; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            die "$name (pid $pid) still runs after $seconds s; see $state/$name.log, or: kill -KILL $pid"
        fi
        sleep 0.1
    done
    rm -f "$state/$name.pid"
    say "$name has stopped."
}

# give_up NAME REASON: ends what was just started, and shows why.
give_up() {
    kill -TERM "$started_pid" 2>/dev/null || true
    rm -f "$state/$1.pid"
    tail -n 15 "$state/$1.log" >&2
    die "$1 $2; its log is $state/$1.log"
}

# option NAME DEFAULT ARGS...: prints the value of --NAME VALUE or --NAME=VALUE, the last one given.
option() {
    local name="--$1" value="$2"
    shift 2
    while [ $# -gt 0 ]; do
        case "$1" in
            "$name") value="${2-}" ;;
            "$name="*) value="${1#*=}" ;;
        esac
        shift
    done
    printf '%s\n' "$value"
}

# How many trainers fit on this node: one per GPU, else one per core, at least 2 (to have something
# to add and remove) and at most 4. $EDL_CPU_SLOTS says otherwise.
cpu_slots() {
    local cores
    cores="$(nproc)"
    if [ "$cores" -lt 2 ]; then cores=2; elif [ "$cores" -gt 4 ]; then cores=4; fi
    echo "${EDL_CPU_SLOTS:-$cores}"
}

# Prints whether the server at $1 answers: exit 0 or 1. With $2, a node of that job must be there.
server_answers() {
    "$python" - "$@" <<'PYTHON'
import sys

from job_server.api_client import ApiClient, ApiError

try:
    api = ApiClient(sys.argv[1])
    api.health()
    if len(sys.argv) > 2:
        hosts = [status.node.job_id for status in api.nodes() if status.alive]
        sys.exit(0 if sys.argv[2] in hosts else 1)
except ApiError:
    sys.exit(1)
PYTHON
}
