#!/usr/bin/env bash
# Start this node's job client in the background. Without arguments it trains ResNet50, on ImageNet in
# PADDLE_EDL_IMAGENET_PATH, else on handwritten digits at 32 pixels, with all GPUs (or CPU slots).
# Arguments go to `python -m job_client`, your own training script and its arguments among them; without
# a script, those behind `--` go to resnet50/train_with_fleet.py.
#   --foreground   stay in front        --stop   end it and its pods        --help   all options
# Honours PADDLE_JOBSERVER, PADDLE_TRAINERS (node IPs; the first hosts the server), PADDLE_JOB_ID,
# PADDLE_EDL_IMAGENET_PATH, PADDLE_EDL_FLEET_CHECKPOINT_PATH, EDL_TOKEN, EDL_TOKEN_FILE.
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
            *) case "$previous" in --keep_pods | --*=* | "" | [!-]*) return 0 ;; esac ;;
        esac
        previous="$argument"
    done
    return 1
}

# Leaves in $experiment what makes the client train ResNet50, and says on what; $@ is for the training.
choose_experiment() {
    local data="${PADDLE_EDL_IMAGENET_PATH:-}" checkpoint
    checkpoint="${PADDLE_EDL_FLEET_CHECKPOINT_PATH:-$state/resnet50_checkpoint}"
    # Pods run in folders of their own: a relative path would mean another place there.
    case "$checkpoint" in *://* | /*) ;; *) checkpoint="$PWD/$checkpoint" ;; esac
    if [ -n "$data" ]; then
        data="$(cd "$data" 2>/dev/null && pwd)" || usage_error \
            "PADDLE_EDL_IMAGENET_PATH: no folder $PADDLE_EDL_IMAGENET_PATH; name the one with train.txt" \
            "and val.txt (or train/ and val/), or unset it to train handwritten digits"
        export PADDLE_EDL_IMAGENET_PATH="$data"
        say "Trains ResNet50 on $data; checkpoints: $checkpoint"
    else
        say "Trains ResNet50 on handwritten digits at 32 pixels, as PADDLE_EDL_IMAGENET_PATH is not set;" \
            "checkpoints: $checkpoint"
    fi
    export PADDLE_EDL_FLEET_CHECKPOINT_PATH="$checkpoint"
    if [ -d "$checkpoint" ] && [ -n "$(ls -A "$checkpoint")" ]; then
        say "It goes on from there; to begin afresh, remove that folder."
    fi
    experiment=(--package_sh "$root/resnet50/package.sh" ./train_pretrain.sh "$@")
}

own=() more=() # before the first --, and behind it
while [ $# -gt 0 ]; do
    if [ "$1" = -- ]; then
        shift
        more=("$@")
        break
    fi
    own+=("$1")
    shift
done
parse_arguments ${own[@]+"${own[@]}"}
[ -z "$help" ] || show_help job_client

nodes="${PADDLE_TRAINERS:-127.0.0.1}"
server="$(option job_server "${PADDLE_JOBSERVER:-${nodes%%,*}:8180}" ${args[@]+"${args[@]}"})"
case "$server" in http://* | https://*) ;; *) server="http://$server" ;; esac
name="job_client${PADDLE_JOB_ID:+_$PADDLE_JOB_ID}"
make_state
if [ -n "$stop" ]; then
    stop_background "$name" 90
    exit
fi

ensure_python
PATH="$(dirname "$python"):$PATH"
export PATH # pods call `python`
[ -n "$foreground" ] || one_at_a_time "$name"
pid="$(running_pid "$state/$name.pid")"
if [ -n "$pid" ]; then
    say "The job client runs already (pid $pid). Stop it: $0 --stop"
    exit 0
fi

command=("$python" -m job_client --job_server "$server" --log_dir "$state/pod_log")
gpus="$(gpu_count)"
if [ "$gpus" -eq 0 ]; then
    command+=(--cpu_slots "$(cpu_slots)")
fi
if names_work ${args[@]+"${args[@]}"}; then
    command+=(--pod_path "$state/pods" "${args[@]}" ${more[@]+-- "${more[@]}"})
else
    choose_experiment ${more[@]+"${more[@]}"}
    command+=(--pod_path "$state/resnet50_pod" ${args[@]+"${args[@]}"} "${experiment[@]}")
fi

case "$server" in
    http://127.* | http://localhost* | http://\[::1\]*) choose_token make ${args[@]+"${args[@]}"} ;;
    *) choose_token find ${args[@]+"${args[@]}"} ;; # of a server elsewhere: copied by the user
esac
if [ -n "$foreground" ]; then
    exec "${command[@]}"
fi
token_file="$(option token_file "" ${args[@]+"${args[@]}"})"
trouble="" refused=0
trouble="$(server_answers "$server" ${token_file:+"$token_file"})" || refused=$?
case "$refused" in
    0) ;;
    1)
        say "No job server answers at $server yet; the client will wait for it. Start one: $here/start_job_server.sh"
        say "  ($trouble)" # one that runs may have a certificate that nobody here trusts
        ;;
    4)
        say "The job server at $server wants its token. If start_job_server.sh made it, it is in edl_run/token there:"
        say "copy that to $state/token here (chmod 600 it), or name it (--token_file, EDL_TOKEN_FILE, EDL_TOKEN)."
        exit 1
        ;;
    *)
        say "What answers at $server refuses this client, or is no job server of ours: $trouble"
        say "Name another one (--job_server, PADDLE_JOBSERVER), or its token (--token_file, EDL_TOKEN_FILE)."
        exit 1
        ;;
esac
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
