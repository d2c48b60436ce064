#!/usr/bin/env bash
# What a container runs, by its first argument; the others go to that program:
#   server     the job server           client     this node's job client (ResNet50 without a script)
#   teacher    a distillation teacher   discovery  tells students which teachers to use
# Anything else is run as it stands: bash, edl status, ...
# Works outside containers just as well. The state lies in $EDL_STATE_DIR.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../scripts/lib.sh"
source "$here/../scripts/background.sh"

# A secret is often mounted so that all may read it, which a server and `edl` refuse: they get a copy. The
# others read the secret itself, again where the server has another one by then.
private_token() {
    local copy
    [ -n "${EDL_TOKEN_FILE:-}" ] || return 0
    case "$(stat -L -c %a "$EDL_TOKEN_FILE")" in
        *00) ;;
        *)
            copy="$state/.token"
            (umask 077 && cat "$EDL_TOKEN_FILE" >"$copy.$$" && mv -f "$copy.$$" "$copy")
            export EDL_TOKEN_FILE="$copy"
            ;;
    esac
}

expected="expected server, client, teacher, discovery, or a command to run"
[ $# -gt 0 ] || usage_error "entry.sh: $expected"
role="$1"
shift
case "$role" in
    -h | --help)
        awk 'NR > 1 { if (!sub(/^# ?/, "")) exit; print }' "$0"
        exit
        ;;
esac
make_state
[ -w "$state" ] || die "$state cannot be written by user $(id -u): mount a folder of that user there," \
    "or run as its owner (docker: --user, compose: EDL_UID)"
[ -z "${EDL_TOKEN_FILE:-}" ] || [ -r "$EDL_TOKEN_FILE" ] || die \
    "EDL_TOKEN_FILE: $EDL_TOKEN_FILE cannot be read by user $(id -u);" \
    "give the file to that user, or run as its owner (docker: --user, compose: EDL_UID)"
# note ROLE HOST PORT: what health.py asks, which is where the program listens.
note() { printf '%s\n' "$*" >"$state/.role"; }
case "$role" in
    server)
        private_token
        note server "$(server_bind "$@")" "$(option server_port 8180 "$@")"
        exec "$here/../scripts/start_job_server.sh" --foreground "$@"
        ;;
    client)
        note client
        exec "$here/../scripts/start_job_client.sh" --foreground "$@"
        ;;
    teacher)
        note teacher "$(option bind 127.0.0.1 "$@")" "$(option port 9292 "$@")"
        ensure_python
        exec "$python" -m distill_reader.serve "$@"
        ;;
    discovery)
        address="$(option server 127.0.0.1:7001 "$@")"
        note discovery "${address%:*}" "${address##*:}"
        ensure_python
        exec "$python" -m distill_reader.discovery "$@"
        ;;
    *) # notes nothing: it may be run beside the program of this container
        type -P -- "$role" >/dev/null || {
            say "entry.sh: there is no command '$role'; $expected"
            exit 127
        }
        private_token
        exec -- "$role" "$@"
        ;;
esac
