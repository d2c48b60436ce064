#!/usr/bin/env bash
# The ResNet50 experiment in containers: a job server and two nodes on this host. Without arguments: up.
#   build    make the image            up      make token and folders, then start in the background
#   status   the job as it is          logs    follow what the containers say
#   stop     end it; state is kept     config  show what compose makes of docker/compose.yaml
#   compose  docker compose for this stack, with the arguments behind it: compose ps, compose run ...
#   --profile NAME   instead of resnet50: mnist, or teachers, who serve what mnist has trained, or the
#                    model in EDL_TEACHER_MODEL; by the name EDL_TEACHER_SERVICE (teacher)
#   --gpu    on GPUs: EDL_GPUS_NODE1 (0) and EDL_GPUS_NODE2 (1), as 0,1,2,3; the image: docker/README.md
# Honours PADDLE_EDL_IMAGENET_PATH (unset: handwritten digits at 32 pixels), and, with their defaults,
# PADDLE_EDL_FLEET_CHECKPOINT_PATH (docker/data/checkpoint), EDL_SLOTS (2 trainers for each node without
# GPUs), EDL_CHANGE_S (900 s between changes), EDL_RESNET50_ARGS (for resnet50/train_with_fleet.py),
# EDL_PORT (8180), EDL_TOKEN_FILE (docker/secrets/edl_token, made once), EDL_DATA_DIR (docker/data),
# EDL_SHM_SIZE (2gb), EDL_IMAGE (edl), EDL_UID and EDL_GID (yours).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

command="" gpu="" profile=resnet50 rest=()
while [ $# -gt 0 ]; do
    argument="$1"
    shift
    case "$argument" in
        -h | --help)
            awk 'NR > 1 { if (!sub(/^# ?/, "")) exit; print }' "$0"
            exit
            ;;
        --gpu) gpu=yes ;;
        --profile | --profile=*)
            case "$argument" in --profile=*) profile="${argument#*=}" ;; *) profile="${1-}" && shift $(($# > 0)) ;; esac
            case "$profile" in
                resnet50 | mnist | teachers) ;;
                *) usage_error "--profile: expected resnet50, mnist or teachers, got '$profile'" ;;
            esac
            ;;
        compose)
            [ -z "$command" ] || usage_error "docker_resnet50.sh: one command at a time: $command or $argument?"
            command=compose rest=("$@")
            break
            ;;
        build | up | status | logs | stop | config)
            [ -z "$command" ] || usage_error "docker_resnet50.sh: one command at a time: $command or $argument?"
            command="$argument"
            ;;
        *) usage_error "docker_resnet50.sh: unknown argument '$argument'; see $0 --help" ;;
    esac
done
command="${command:-up}"

check_docker() {
    command -v docker >/dev/null 2>&1 || die "No docker here: install Docker Engine with its compose" \
        "plugin, or run the same without containers: scripts/start_job_server.sh, start_job_client.sh"
    docker compose version >/dev/null 2>&1 || die "docker has no compose plugin (Debian:" \
        "docker-compose-plugin); EDL needs version 2 of it"
    [ "$command" = config ] || docker info >/dev/null 2>&1 || die "docker does not reach its engine: is it" \
        "started, and may you use it (group docker)? 'docker info' says more"
}

# Makes a path of the user's absolute: compose would look for a relative one beside its file.
absolute() { case "$1" in /*) printf '%s\n' "$1" ;; *) printf '%s\n' "$PWD/$1" ;; esac; }

# Folders that an engine makes are root's, and containers run as the caller: so they are made here.
make_folders() {
    mkdir -p "$EDL_DATA_DIR"/{job-server,node1,node2,mnist,teacher,discovery,empty} \
        "$PADDLE_EDL_FLEET_CHECKPOINT_PATH" ||
        die "The folders for state and checkpoints cannot be made; name others by EDL_DATA_DIR and" \
            "PADDLE_EDL_FLEET_CHECKPOINT_PATH"
    if [ ! -s "$EDL_TOKEN_FILE" ]; then
        mkdir -p "$(dirname "$EDL_TOKEN_FILE")"
        (umask 077 && od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"$EDL_TOKEN_FILE")
        say "Made a token for this stack: $EDL_TOKEN_FILE"
    fi
    if [ "$(id -u)" -eq 0 ]; then # containers do not run as root, even for root
        chown "$EDL_UID:$EDL_GID" "$EDL_DATA_DIR"/{job-server,node1,node2,mnist,teacher,discovery} \
            "$PADDLE_EDL_FLEET_CHECKPOINT_PATH" "$EDL_TOKEN_FILE"
    fi
}

check_docker
if [ -n "${PADDLE_EDL_IMAGENET_PATH:-}" ]; then
    [ -d "$PADDLE_EDL_IMAGENET_PATH" ] || usage_error "PADDLE_EDL_IMAGENET_PATH: no folder" \
        "$PADDLE_EDL_IMAGENET_PATH; name the one with train.txt and val.txt (or train/ and val/), or unset it"
    PADDLE_EDL_IMAGENET_PATH="$(absolute "$PADDLE_EDL_IMAGENET_PATH")"
    export PADDLE_EDL_IMAGENET_PATH
fi
case "${PADDLE_EDL_FLEET_CHECKPOINT_PATH:-}" in
    *://*) usage_error "PADDLE_EDL_FLEET_CHECKPOINT_PATH: $PADDLE_EDL_FLEET_CHECKPOINT_PATH is a URL; here" \
        "it is the folder that both nodes mount" ;;
esac
EDL_DATA_DIR="$(absolute "${EDL_DATA_DIR:-$root/docker/data}")"
EDL_TOKEN_FILE="$(absolute "${EDL_TOKEN_FILE:-$root/docker/secrets/edl_token}")"
PADDLE_EDL_FLEET_CHECKPOINT_PATH="$(absolute \
    "${PADDLE_EDL_FLEET_CHECKPOINT_PATH:-$EDL_DATA_DIR/checkpoint}")"
if [ "$(id -u)" -ne 0 ]; then
    EDL_UID="${EDL_UID:-$(id -u)}" EDL_GID="${EDL_GID:-$(id -g)}"
else
    EDL_UID="${EDL_UID:-10001}" EDL_GID="${EDL_GID:-10001}"
fi
EDL_TEACHER_MODEL="$(absolute "${EDL_TEACHER_MODEL:-$EDL_DATA_DIR/mnist/mnist_distill/mnist_cnn_model}")"
export EDL_DATA_DIR EDL_TOKEN_FILE PADDLE_EDL_FLEET_CHECKPOINT_PATH EDL_UID EDL_GID EDL_TEACHER_MODEL
compose=(docker compose --file "$root/docker/compose.yaml")
[ -z "$gpu" ] || compose+=(--file "$root/docker/compose.gpu.yaml")
compose+=(--profile "$profile")

# Runs `edl` in the job server's container.
edl() { "${compose[@]}" exec -T job-server /opt/edl/docker/entry.sh edl "$@" --server http://127.0.0.1:8180; }

say_what_runs() {
    if [ "$profile" != resnet50 ]; then
        say "It runs.  look: $0 --profile $profile logs    stop: $0 --profile $profile stop"
        return
    fi
    case "$(edl status resnet50 --json 2>/dev/null)" in
        *'"state": "SUCCEEDED"'* | *'"state": "FAILED"'* | *'"state": "STOPPED"'*)
            say "Its job has ended before, and nothing trains: see $0 status. To begin afresh: $0 stop," \
                "then remove $EDL_DATA_DIR and $PADDLE_EDL_FLEET_CHECKPOINT_PATH"
            ;;
        *) say "It runs.  look: $0 status, $0 logs    stop: $0 stop" ;;
    esac
    say "checkpoints: $PADDLE_EDL_FLEET_CHECKPOINT_PATH    logs and state: $EDL_DATA_DIR"
}

case "$command" in
    build) "${compose[@]}" build job-server ;; # the others have the same image
    up)
        [ "$profile" != teachers ] || [ -d "$EDL_TEACHER_MODEL" ] || usage_error "EDL_TEACHER_MODEL: no folder" \
            "$EDL_TEACHER_MODEL; name one that 'edl serve --model' takes, or make one: $0 --profile mnist up"
        make_folders
        "${compose[@]}" up --detach
        say_what_runs
        ;;
    status) if [ "$profile" = resnet50 ]; then edl status; else "${compose[@]}" ps; fi ;;
    compose) "${compose[@]}" ${rest[@]+"${rest[@]}"} ;;
    logs) "${compose[@]}" logs --follow ;;
    stop) "${compose[@]}" down ;;
    config) "${compose[@]}" config ;;
esac
