#!/usr/bin/env bash
# Builds the image and runs its stack for real, with Docker or podman: each profile of docker/compose.yaml from
# cold to healthy, a node killed, all of it stopped and started again, students of teachers. Some ten minutes.
# Prints a table, and leaves nothing behind but the image.
#   --no-build   take the image as it is        --keep   leave the folder with state and logs
# Exit code: 0 all is well, 1 something is not, 2 wrong arguments, 77 no engine here: nothing was tried.
# Honours EDL_IMAGE, EDL_BASE, EDL_REDIS_IMAGE (docker/README.md) and EDL_CHECK_TIMEOUT_S (600, for each wait).
# Podman is used by Docker's command line with its compose plugin, and as root.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$here/lib.sh"

build=yes keep=""
for argument in "$@"; do
    case "$argument" in
        -h | --help)
            awk 'NR > 1 { if (!sub(/^# ?/, "")) exit; print }' "$0"
            exit
            ;;
        --no-build) build="" ;;
        --keep) keep=yes ;;
        *) usage_error "check_containers.sh: unknown argument '$argument'; see $0 --help" ;;
    esac
done
timeout_s="${EDL_CHECK_TIMEOUT_S:-600}"

skip() { say "Skipped: $*"; exit 77; }
command -v docker >/dev/null 2>&1 || skip "no docker here (podman is used by docker's command line, too)"
docker compose version >/dev/null 2>&1 || skip "docker has no compose plugin"

work="$(mktemp -d)"
helpers=() # what runs beside this script: podman's service and its health checks, where nobody else runs them
rows=()
row() { rows+=("$(printf '%-52s %s' "$1" "$2")") && say "  $1: $2"; }
stack() { bash "$here/docker_resnet50.sh" --profile "$@"; }

finish() {
    local status=$?
    set +e
    trap - EXIT
    if [ "$status" -ne 77 ]; then
        if [ "$status" -ne 0 ]; then
            say "--- what the containers said last"
            for profile in resnet50 mnist teachers; do stack "$profile" compose logs --tail 15 >&2 2>&1; done
        fi
        for profile in teachers mnist resnet50; do
            stack "$profile" compose down --volumes --timeout 20 >/dev/null 2>&1
        done
    fi
    [ "${#helpers[@]}" -eq 0 ] || kill "${helpers[@]}" 2>/dev/null
    if [ -n "$keep" ]; then say "State and logs: $work"; else rm -rf "$work"; fi
    [ "$status" -ne 77 ] || exit 77
    printf '%s\n' ${rows[@]+"${rows[@]}"}
    if [ "$status" -eq 0 ]; then echo "All is well."; else echo "Failed: see above."; fi
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

if ! docker info >/dev/null 2>&1; then
    command -v podman >/dev/null 2>&1 || skip "docker reaches no engine, and there is no podman"
    [ "$(id -u)" -eq 0 ] || skip "docker reaches no engine, and podman is only used as root"
    export DOCKER_HOST="unix://$work/podman.sock"
    podman system service --time 0 "$DOCKER_HOST" >"$work/podman.log" 2>&1 &
    helpers+=($!)
    for _ in $(seq 100); do
        ! docker info >/dev/null 2>&1 || break
        sleep 0.1
    done
    docker info >/dev/null 2>&1 || { cat "$work/podman.log" >&2 && skip "podman's service does not answer"; }
fi
# Beside a stack that may run here already, with folders and ports of its own.
export COMPOSE_PROJECT_NAME="edl-check-$$" EDL_DATA_DIR="$work/data" EDL_TOKEN_FILE="$work/token"
export EDL_PORT="${EDL_PORT:-28180}" EDL_DISCOVERY_PORT="${EDL_DISCOVERY_PORT:-27001}"
export EDL_TEACHER_PORT="${EDL_TEACHER_PORT:-29292}" EDL_IMAGE="${EDL_IMAGE:-edl}"
unset PADDLE_EDL_IMAGENET_PATH PADDLE_EDL_FLEET_CHECKPOINT_PATH EDL_TEACHER_MODEL EDL_TEACHER_ADVERTISE
# Small steps, two nodes with a trainer each; no checkpoint falls due, so that only a last one can keep steps.
export EDL_SLOTS=1 EDL_CHANGE_S=86400 EDL_MNIST_ARGS="--num_epochs 2 --test_epochs 1 -- --num_epochs 1"
EDL_RESNET50_ARGS="--model ResNet18 --num_epochs 1000 --total_images 64 --total_batch_size 8 --save_steps 100000"
export EDL_RESNET50_ARGS

# Podman leaves health checks to systemd, and builds by itself, without BuildKit.
case "$(docker version --format '{{range .Server.Components}}{{.Name}} {{end}}')" in
    *Podman*)
        export DOCKER_BUILDKIT=0
        if [ ! -d /run/systemd/system ]; then
            while sleep 2; do
                for each in $(docker ps --quiet --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME"); do
                    podman healthcheck run "$each" || true
                done
            done >/dev/null 2>&1 &
            helpers+=($!)
        fi
        ;;
esac

now() { date +%s.%N; }
minus() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.1f", a - b }'; }

# wait_for WHAT COMMAND...: until the command succeeds.
wait_for() {
    local what="$1" deadline=$((SECONDS + timeout_s))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$deadline" ] || die "$what: not within $timeout_s s"
        sleep 0.5
    done
}

container() { stack "$1" compose ps --all --quiet "$2"; }
is_healthy() { [ "$(docker inspect --format '{{.State.Health.Status}}' "$(container "$1" "$2")")" = healthy ]; }

# cold_up PROFILE SERVICE...: starts what is not there yet, until the engine calls every service healthy.
# $what names the row of the table, if it is no start from nothing.
cold_up() {
    local profile="$1" begin each
    shift
    begin="$(now)"
    stack "$profile" up >/dev/null 2>"$work/up.log" || { cat "$work/up.log" >&2 && die "$profile: up failed"; }
    for each in "$@"; do wait_for "$each is healthy" is_healthy "$profile" "$each"; done
    row "$profile: ${what:-up to healthy}" "$(minus "$(now)" "$begin") s ($*)"
}

# Leaves the job as it is in $state, $step, $stage, $trainers, $committed_at and $redone.
look() {
    read -r state step stage trainers committed_at redone < <(
        stack resnet50 compose exec -T job-server /opt/edl/docker/entry.sh python - 2>/dev/null <<'PYTHON'
import os
from pathlib import Path

from job_server.api.api_client import ApiClient

with ApiClient("http://127.0.0.1:8180", Path(os.environ["EDL_TOKEN_FILE"]).read_text().strip()) as api:
    job = api.status("resnet50")
last = [each for each in job.stages if each.outcome == "committed"][-1:]
stage = [(each.stage, each.trainers, each.committed_at) for each in last] or [(0, 0, 0)]
print(job.state.value, job.step, *stage[0], job.redone_steps)
PYTHON
    ) || return 1
}
# trains_on TRAINERS STEP: whether that many (0: however many) train, beyond that step.
trains_on() {
    look && { [ "$1" -eq 0 ] || [ "$trainers" -eq "$1" ]; } && [ "$step" -gt "$2" ] &&
        case "$state" in RUNNING | PREPARING) ;; *) false ;; esac
}
has_stopped() { look && [ "$state" = STOPPED ]; }

if [ -n "$build" ]; then
    begin="$(now)"
    stack resnet50 build >"$work/build.log" 2>&1 || { tail -n 40 "$work/build.log" >&2 && die "the image is not built"; }
    row "image: built" "$(minus "$(now)" "$begin") s"
fi
# Newest layer first; the largest one holds the packages, and what is above it is EDL.
docker history --human=false --format '{{.Size}}' "$EDL_IMAGE" >"$work/layers"
row "image: size" "$(awk '{ all += $1 } END { printf "%.0f MB", all / 1e6 }' "$work/layers")"
row "image: layers that a change of EDL makes" "$(awk '{ size[NR] = $1; if ($1 > most) { most = $1; at = NR } }
    END { for (n = 1; n < at; n++) above += size[n]; printf "%.1f MB", above / 1e6 }' "$work/layers")"

say "--- resnet50"
cold_up resnet50 job-server node1 node2
wait_for "both nodes train" trains_on 2 3
killed="$(now)" before="$stage" at="$step"
docker kill "$(container resnet50 node2)" >/dev/null
wait_for "one node trains on" trains_on 1 "$at"
[ "$stage" -gt "$before" ] || die "no new stage after node2 was killed"
row "resnet50: node killed to the next stage" "$(minus "$committed_at" "$killed") s, $redone steps made again"
begin="$(now)"
stack resnet50 up >/dev/null 2>&1
wait_for "the node is back" trains_on 2 "$step"
row "resnet50: the node started again to its stage" "$(minus "$committed_at" "$begin") s"
before="$redone" at="$step"
begin="$(now)"
stack resnet50 compose stop >/dev/null 2>&1
row "resnet50: stopped" "$(minus "$(now)" "$begin") s"
begin="$(now)"
stack resnet50 up >/dev/null 2>&1
wait_for "it trains on" trains_on 0 "$at"
row "resnet50: started again to its stage" "$(minus "$committed_at" "$begin") s"
row "resnet50: steps lost by the stop" "$((redone - before))"
[ "$redone" -eq "$before" ] || die "the stop lost $((redone - before)) steps"
stack resnet50 compose exec -T job-server /opt/edl/docker/entry.sh edl stop resnet50 >/dev/null
wait_for "the training ends" has_stopped
stack resnet50 compose exec -T node1 edl verify /checkpoint >"$work/verify" 2>&1 || { cat "$work/verify" >&2 && die "edl verify"; }
row "resnet50: edl stop" "at step $step; $(tail -n 1 "$work/verify")"
stack resnet50 stop >/dev/null 2>&1

say "--- mnist"
cold_up mnist mnist
code="$(docker wait "$(container mnist mnist)")"
[ "$code" -eq 0 ] || die "mnist ended with $code"
row "mnist: ended" "with 0; $(docker logs "$(container mnist mnist)" 2>/dev/null | tail -n 2 | head -n 1 | tr -s ' ')"

say "--- teachers"
cold_up teachers redis discovery teacher
begin="$(now)"
stack teachers compose run --rm -T -e PADDLE_DISTILL_BALANCE_SERVER=discovery:7001 \
    -e PADDLE_DISTILL_SERVICE_NAME=teacher mnist \
    python /opt/edl/mnist_distill/train_with_fleet.py --num_epochs 1 --labelled 200 --use_distill_service True \
    >"$work/student.log" 2>&1 || { tail -n 30 "$work/student.log" >&2 && die "the student failed"; }
row "teachers: a student by discovery" "ended after $(minus "$(now)" "$begin") s"
docker kill "$(container teachers redis)" >/dev/null
docker kill "$(container teachers teacher)" >/dev/null
what="Redis and the teacher killed, up to healthy" cold_up teachers redis discovery teacher
