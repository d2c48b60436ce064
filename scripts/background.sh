# Programs in the background, with a pid file and a log in $state. Sourced, after lib.sh.
# shellcheck shell=bash source-path=SCRIPTDIR source=lib.sh
state="${EDL_STATE_DIR:-$root/edl_run}"

# Prints the start time of a process in clock ticks since boot; nothing if there is none. With the
# pid it names a process for good: a pid alone may be another program's by now.
started_at() {
    local stat
    stat="$(cat "/proc/$1/stat" 2>/dev/null)" || return 0
    stat="${stat##*) }"  # the name before it may contain blanks
    [ "${stat%% *}" = Z ] || cut -d ' ' -f 20 <<<"$stat"
}

# Prints the pid that the pid file $1 names.
pid_in() {
    local pid=""
    [ -r "$1" ] && read -r pid _ <"$1" || return 0
    echo "$pid"
}

# Prints the pid that the pid file $1 names, if that process is alive.
running_pid() {
    local pid="" ticks=""
    [ -r "$1" ] && read -r pid ticks <"$1" || return 0
    [ -n "$ticks" ] && [ "$(started_at "$pid")" = "$ticks" ] && echo "$pid" || return 0
}

# Prints the machine on which what the pid file $1 names was started, if it is another one: several may
# share $state, as in a home that they mount.
other_machine() {
    local machine
    machine="$(sed -n 's/^on //p' "$1" 2>/dev/null)" || return 0
    [ "$machine" = "$(uname -n)" ] || echo "$machine"
}

# one_at_a_time NAME: waits until no other script starts NAME, or asks it to end. Of two that start it
# at once the second would take the first one's pid file for its own, and remove it when it fails.
one_at_a_time() {
    local lock="$state/$1.lock"
    : >>"$lock" || die "$lock cannot be made; name another folder: EDL_STATE_DIR=DIR $0"
    exec 9>>"$lock"
    flock 9 || die "$lock cannot be locked; name a folder on a local disk: EDL_STATE_DIR=DIR $0"
}

# in_background NAME COMMAND...: starts it in a session of its own; its log is $state/NAME.log.
# Leaves its pid in $started_pid, and in $of_other the pid file of another machine that was there.
in_background() {
    local name="$1"
    shift
    of_other=""
    [ -z "$(other_machine "$state/$name.pid")" ] || of_other="$(cat "$state/$name.pid")"
    setsid "$@" >>"$state/$name.log" 2>&1 </dev/null 9>&- &
    started_pid=$!
    if ! printf '%s %s\non %s\n' "$started_pid" "$(started_at "$started_pid")" "$(uname -n)" >"$state/$name.pid"; then
        kill -TERM "$started_pid" 2>/dev/null || true # else no --stop would ever find it
        rm -f "$state/$name.pid"
        die "$state/$name.pid cannot be written, so $name is not started. Make room there, or name another" \
            "folder: EDL_STATE_DIR=DIR $0"
    fi
}

# stop_background NAME SECONDS: SIGTERM, wait, and after that many seconds say that it still runs. A
# second call only waits: a client takes a second signal as "now, without what you have not written".
stop_background() {
    local name="$1" seconds="$2" pid ticks deadline machine
    one_at_a_time "$name"
    pid="$(running_pid "$state/$name.pid")"
    if [ -z "$pid" ]; then
        machine="$(other_machine "$state/$name.pid")"
        [ -z "$machine" ] || die "$name was started on $machine, which has $state as well: stop it there." \
            "If it does not run any more: rm $state/$name.pid"
        rm -f "$state/$name.pid"
        say "$name does not run."
        return
    fi
    if grep -qx asked "$state/$name.pid"; then
        say "$name was asked to end before; waiting for it."
    else
        kill -TERM "$pid" 2>/dev/null || true
        echo asked >>"$state/$name.pid" || true # a full disk
    fi
    exec 9>&-
    ticks="$(started_at "$pid")"
    deadline=$((SECONDS + seconds))
    while [ -n "$ticks" ] && [ "$(started_at "$pid")" = "$ticks" ]; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            die "$name (pid $pid) still runs after $seconds s; see $state/$name.log. Call this again to go on" \
                "waiting; kill $pid ends it at once, without what it has not written."
        fi
        sleep 0.1
    done
    [ "$(pid_in "$state/$name.pid")" != "$pid" ] || rm -f "$state/$name.pid" # else it was started again
    say "$name has stopped."
}

# give_up NAME REASON: ends what was just started, and shows why.
give_up() {
    kill -TERM "$started_pid" 2>/dev/null || true
    rm -f "$state/$1.pid"
    [ -z "$of_other" ] || printf '%s\n' "$of_other" >"$state/$1.pid"
    tail -n 15 "$state/$1.log" >&2
    [ -z "$of_other" ] || say "$state is that of another machine, too; give this one its own: EDL_STATE_DIR=DIR $0"
    die "$1 $2; its log is $state/$1.log"
}

# parse_arguments ARGS...: what both start scripts understand. Sets $foreground and $stop (yes, or
# empty), $args (what goes to the program) and $help (yes where it is asked for).
# shellcheck disable=SC2034  # used by those who source this
parse_arguments() {
    foreground="" stop="" help="" args=()
    local argument
    for argument in "$@"; do
        case "$argument" in
            --foreground) foreground=yes ;;
            --stop) stop=yes ;;
            *)
                args+=("$argument")
                case "$argument" in -h | --help) help=yes ;; esac
                ;;
        esac
    done
}

# show_help MODULE: prints the comment that the calling script begins with, and the module's options.
show_help() {
    ensure_python
    awk 'NR > 1 { if (!sub(/^# ?/, "")) exit; print }' "$0"
    exec "$python" -m "$1" --help
}

# make_state: makes $state, for pid files and logs.
make_state() {
    mkdir -p "$state" || die "$state cannot be made; name another folder: EDL_STATE_DIR=DIR $0"
}

# choose_token make|find ARGS...: which token server and client of this state folder use: the user's own,
# else that of the folder, in $EDL_TOKEN_FILE. `make` makes one where there is none.
choose_token() {
    local how="$1"
    shift
    [ -z "$(option token_file "${EDL_TOKEN_FILE:-${EDL_TOKEN:-}}" "$@")" ] || return 0
    if [ ! -e "$state/token" ]; then
        [ "$how" = make ] || return 0
        # Written aside: a full disk leaves no empty token, and of two scripts at once one wins.
        (umask 077 && set -o pipefail && trap 'rm -f "$state/token.$$"' EXIT &&
            od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"$state/token.$$" &&
            { mv -n "$state/token.$$" "$state/token" || [ -e "$state/token" ]; }) ||
            die "$state/token cannot be made; name another folder: EDL_STATE_DIR=DIR $0"
    fi
    EDL_TOKEN_FILE="$(cd "$state" && pwd)/token"
    export EDL_TOKEN_FILE
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

# server_bind ARGS...: prints where a job server with these arguments listens: the first of
# $PADDLE_TRAINERS, or what --bind says. That node alone is 127.0.0.1 by any of its names.
server_bind() {
    local node="${PADDLE_TRAINERS:-127.0.0.1}"
    node="${node%%,*}"
    case "$node" in 127.* | localhost | ::1) node=127.0.0.1 ;; esac
    option bind "$node" "$@"
}

# How many trainers fit on this node: one per GPU, else one per core that this container may use, at
# least 2 (to have something to add and remove) and at most 4. $EDL_CPU_SLOTS says otherwise.
cpu_slots() {
    local cores="${EDL_CPU_SLOTS:-}"
    if [ -z "$cores" ]; then
        cores="$("$python" -m pod_runtime.cgroups)" || return
        if [ "$cores" -lt 2 ]; then cores=2; elif [ "$cores" -gt 4 ]; then cores=4; fi
    fi
    echo "$cores"
}

# Exit 0 if the job server at $1 answers; $2: the file with its token, else EDL_TOKEN_FILE, EDL_TOKEN.
# Else print the reason and exit 1 where none answers, 4 where it wants another token, 3 where what
# answers is not ours or refuses us for another reason.
server_answers() {
    "$python" - "$@" <<'PYTHON'
import os
import sys

from job_server.api.api_client import ApiClient, ApiError
from job_server.api.command_line import read_token
from job_server.api.errors import ConfigError, Retryable, Unauthorized

_, url, *token_file = sys.argv
try:
    ApiClient(url, read_token(token_file[0] if token_file else None, os.environ)).health()
except (ApiError, ConfigError) as error:
    print(error)
    away = isinstance(error, Retryable) and error.status != 404  # 404: of another web server
    sys.exit(1 if away else 4 if isinstance(error, Unauthorized) else 3)
PYTHON
}
