#!/usr/bin/env bash
# Start the job server in the background. Without arguments: this node, one pod per GPU (or CPU slot),
# and the change of the pod set every 900 s; all arguments go to `python -m job_server`.
#   --foreground   stay in front        --stop   end the one that runs        --help   all options
# Honours PADDLE_TRAINERS (node IPs; the first hosts the server), PADDLE_JOB_ID, EDL_TOKEN and
# EDL_TOKEN_FILE; without a token it makes one, for all servers and clients of its folder: edl_run/token.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
source "$here/lib.sh"
source "$here/background.sh"

parse_arguments "$@"
[ -z "$help" ] || show_help job_server

nodes="${PADDLE_TRAINERS:-127.0.0.1}"
port="$(option server_port 8180 ${args[@]+"${args[@]}"})"
# 0, any free one, is for programs that read the server's log: clients could not be told.
case "$port" in
    '' | 0* | *[!0-9]* | ??????*) usage_error "--server_port: expected a port number, got '$port'" ;;
esac
[ "$port" -le 65535 ] || usage_error "--server_port: expected a port number, got '$port'"
name="job_server_$port"
make_state
if [ -n "$stop" ]; then
    stop_background "$name" 30
    exit
fi

ensure_python
slots="$(gpu_count)"
[ "$slots" -gt 0 ] || slots="$(cpu_slots)"
command=("$python" -m job_server --node_ips "$nodes" --server_port "$port"
    --gpu_num_of_node "$slots" --pod_num_of_node "$slots" --db "$state/$name.db")
if [ -n "${PADDLE_JOB_ID:-}" ]; then
    command+=(--job_id "$PADDLE_JOB_ID")
fi
bound="$(server_bind ${args[@]+"${args[@]}"})"
# Any other than 127.0.0.1 wants a token: the server says so if there is none.
command+=(--bind "$bound" ${args[@]+"${args[@]}"})
case "$bound" in 0.0.0.0) bound=127.0.0.1 ;; ::) bound="[::1]" ;; *:*) bound="[$bound]" ;; esac
url="http://$bound:$port"
token_file="$(option token_file "" ${args[@]+"${args[@]}"})"
[ -n "$foreground" ] || one_at_a_time "$name"
pid="$(running_pid "$state/$name.pid")"
if [ -n "$pid" ]; then
    say "The job server runs already (pid $pid): $url/   Stop it: $0 --stop --server_port $port"
    exit 0
fi
tokenless=""
[ -e "$state/token" ] || for file in "$state"/job_client*.pid; do
    tokenless="$tokenless$(running_pid "$file")"
done
if [ -n "$tokenless" ]; then # of the version before: a token would shut it out, and its pods
    say "It gets no token, so every user of this machine may use it: the job client that runs has none." \
        "Stop both, and start them again."
else
    choose_token make ${args[@]+"${args[@]}"}
fi
if [ -n "$foreground" ]; then
    exec "${command[@]}"
fi
if server_answers "$url" ${token_file:+"$token_file"} >/dev/null; then
    die "A job server that is not of $state answers already at $url/: use that one, or end it," \
        "or name another port (--server_port)."
fi
: >>"$state/$name.log"
logged="$(wc -c <"$state/$name.log")"
in_background "$name" "${command[@]}"
for _ in $(seq 150); do
    if [ -z "$(running_pid "$state/$name.pid")" ]; then
        give_up "$name" "ended at once"
    fi
    if server_answers "$url" ${token_file:+"$token_file"} >/dev/null; then
        say "The job server runs (pid $started_pid): $url/"
        # Such as that the job has ended, by what the database holds: nothing will train then.
        tail -c +"$((logged + 1))" "$state/$name.log" | grep -F " WARNING job_server: " >&2 || true
        say "  look:  $(dirname "$python")/edl status --follow --server $url     log: $state/$name.log"
        say "  page:  $("$python" -m edl page --server "$url")"
        say "         opens once; another link: $(dirname "$python")/edl page --server $url"
        [ "$bound" = 127.0.0.1 ] || [ "${EDL_TOKEN_FILE:-}" != "$(cd "$state" && pwd)/token" ] || say \
            "  other nodes need its token: copy $state/token to the same place there, or name it by EDL_TOKEN_FILE"
        say "  stop:  $0 --stop$([ "$port" = 8180 ] || echo " --server_port $port")"
        exit 0
    fi
    sleep 0.1
done
give_up "$name" "does not answer at $url"
