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

# A secret is often mounted so that all may read it, which the programs refuse: they get a copy.
private_token() {
    local copy
    [ -n "${EDL_TOKEN_FILE:-}" ] || return 0
    [ -r "$EDL_TOKEN_FILE" ] || die "EDL_TOKEN_FILE: $EDL_TOKEN_FILE cannot be read by user $(id -u);" \
        "give the file to that user, or run as its owner (docker: --user, compose: EDL_UID)"
    case "$(stat -L -c %a "$EDL_TOKEN_FILE")" in
        *00) ;;
        *)
            copy="$state/.token"
            (umask 077 && cat "$EDL_TOKEN_FILE" >"$copy.$$" && mv -f "$copy.$$" "$copy")
            export EDL_TOKEN_FILE="$copy"
            ;;
    esac
}

[ $# -gt 0 ] || usage_error "entry.sh: expected server, client, teacher, discovery, or a command to run"
role="$1"
shift
make_state
[ -w "$state" ] || die "$state cannot be written by user $(id -u): mount a folder of that user there," \
    "or run as its owner (docker: --user, compose: EDL_UID)"
private_token
case "$role" in # health.py reads what is noted here
    server)
        echo "server $(option server_port 8180 "$@")" >"$state/.role"
        exec "$here/../scripts/start_job_server.sh" --foreground "$@"
        ;;
    client)
        echo "client" >"$state/.role"
        exec "$here/../scripts/start_job_client.sh" --foreground "$@"
        ;;
    teacher)
        echo "teacher $(option port 9292 "$@")" >"$state/.role"
        ensure_python
        exec "$python" -m distill_reader.serve "$@"
        ;;
    discovery)
        address="$(option server 127.0.0.1:7001 "$@")"
        echo "discovery ${address##*:}" >"$state/.role"
        ensure_python
        exec "$python" -m distill_reader.discovery "$@"
        ;;
    *) # notes nothing: it may be run beside the program of this container
        exec "$role" "$@"
        ;;
esac
