#!/usr/bin/env bash
# Start this node's job client in the background. Without arguments it trains examples/digits on all
# GPUs (or CPU slots); arguments go to `python -m job_client`, the training script among them.
#   --foreground   stay in front        --stop   end it and its pods        --help   all options
# Honours PADDLE_JOBSERVER, PADDLE_TRAINERS (node IPs; the first hosts the server), PADDLE_JOB_ID,
# PADDLE_EDL_FLEET_CHECKPOINT_PATH, EDL_TOKEN.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
source "$here/lib.sh"
source "$here/background.sh"

# Whether these arguments of the client say what to run: a script, or a folder of jobs. The word
# after a flag is that flag's value.
names_work() {
    local previous="" argument
    for argument in "$@"; do
        case "$argument" in
            --jobs_dir | --jobs_dir=*) return 0 ;;
            -*) ;;
            *) case "$previous" in --*=* | "" | [!-]*) return 0 ;; esac ;;
        esac
        previous="$argument"
    done
    return 1
}

foreground="" stop="" args=()
for argument in "$@"; do
    case "$argument" in
        --foreground) foreground=yes ;;
        --stop) stop=yes ;;
        *) args+=("$argument") ;;
    esac
done
for argument in "$@"; do
    case "$argument" in -h | --help)
        ensure_python
        sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exec "$python" -m job_client --help
        ;;
    esac
done

nodes="${PADDLE_TRAINERS:-127.0.0.1}"
server="$(option job_server "${PADDLE_JOBSERVER:-${nodes%%,*}:8180}" ${args[@]+"${args[@]}"})"
case "$server" in http://* | https://*) ;; *) server="http://$server" ;; esac
name="job_client${PADDLE_JOB_ID:+_$PADDLE_JOB_ID}"
mkdir -p "$state" || die "$state cannot be made; name another folder: EDL_STATE_DIR=DIR $0"
if [ -n "$stop" ]; then
    stop_background "$name" 90
    exit
fi

ensure_python
PATH="$(dirname "$python"):$PATH"
export PATH # pods call `python`
command=("$python" -m job_client --job_server "$server"
    --log_dir "$state/pod_log" --pod_path "$state/pods")
if [ "$(gpu_count)" -eq 0 ]; then
    command+=(--cpu_slots "$(cpu_slots)")
fi
command+=(${args[@]+"${args[@]}"})
if ! names_work ${args[@]+"${args[@]}"}; then
    checkpoint="${PADDLE_EDL_FLEET_CHECKPOINT_PATH:-$state/digits_checkpoint}"
    export EDL_CHECKPOINT="$checkpoint" # the launcher looks there for the highest stage
    command+=("$root/examples/digits/train.sh" --epochs 400 --checkpoint "$checkpoint")
    if [ -d "$checkpoint" ]; then
        say "Training goes on from $checkpoint; to begin afresh, remove that folder."
    fi
fi

pid="$(running_pid "$state/$name.pid")"
if [ -n "$pid" ]; then
    say "The job client runs already (pid $pid). Stop it: $0 --stop"
    exit 0
fi
if [ -n "$foreground" ]; then
    exec "${command[@]}"
fi
if ! server_answers "$server"; then
    say "No job server answers at $server yet; the client will wait for it. Start one: $here/start_job_server.sh"
fi
in_background "$name" "${command[@]}"
for _ in $(seq 15); do # a wrong command line ends it within that time
    if [ -z "$(running_pid "$state/$name.pid")" ]; then
        give_up "$name" "ended at once"
    fi
    sleep 0.1
done
say "The job client runs (pid $started_pid) for $server."
say "  look:  $(dirname "$python")/edl status --follow --server $server     log: $state/$name.log, pods: $state/pod_log"
say "  stop:  $0 --stop"
