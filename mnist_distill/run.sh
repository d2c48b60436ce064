#!/usr/bin/env bash
# Service distillation in one command: trains a teacher, serves it, distils a small student, trains the
# same student without a teacher, compares the two, and ends the teacher. A few minutes on a CPU.
#   ./run.sh --data_dir DIR                        DIR has MNIST's four files; without it: smaller digits
#   ./run.sh [STUDENT'S OPTIONS] [-- TEACHER'S]    options of train_with_fleet.py, which has --help; what
#                                                  the student is told of --data_dir, --use_gpu and
#                                                  --seed, the teacher is told as well
# Honours TEACHERS (1: how many serve), EDL_PYTHON, EDL_STATE_DIR (edl_run; in it mnist_distill/ gets the
# teacher and the logs).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=../scripts/lib.sh
source "$here/../scripts/lib.sh"
# shellcheck source-path=SCRIPTDIR source=../scripts/background.sh
source "$here/../scripts/background.sh"

students=() teacher=() # options, before -- and behind it
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case "$1" in
        -h | --help)
            awk 'NR > 1 { if (!sub(/^# ?/, "")) exit; print }' "$0"
            exit
            ;;
    esac
    students+=("$1")
    shift
done
[ $# -eq 0 ] || teacher=("${@:2}")
teachers="${TEACHERS:-1}"
[[ "$teachers" =~ ^[1-9][0-9]?$ ]] || usage_error "TEACHERS: expected a number from 1 to 99, got '$teachers'"
use_gpu="$(option use_gpu "" ${students[@]+"${students[@]}"})"
case "$use_gpu" in --*) use_gpu=True ;; esac # it stands without a value
shared=() # what the teacher's training is told of this
for name in data_dir seed; do
    value="$(option "$name" "" ${students[@]+"${students[@]}"})"
    [ -z "$value" ] || shared+=("--$name=$value")
done
[ -z "$use_gpu" ] || shared+=("--use_gpu=$use_gpu")

ensure_python
"$python" -c 'import aiohttp, google.protobuf, grpc, prometheus_client' 2>/dev/null || die \
    "$python lacks what a teacher needs; in $root: $python -m pip install -e '.[distill,examples]'"
make_state
out="$state/mnist_distill"
mkdir -p "$out"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # networks as small as these gain nothing by more

# --- processes: all of them end with this script, however it ends
running=()
grace_s=20 # from SIGTERM to SIGKILL; teachers answer first what they were asked

is_alive() { kill -0 "$1" 2>/dev/null; }

end_all() {
    local pid deadline
    trap '' INT TERM HUP # a second Ctrl-C must not leave a teacher behind
    for pid in ${running[@]+"${running[@]}"}; do
        kill -TERM "$pid" 2>/dev/null || true
    done
    deadline=$((SECONDS + grace_s))
    for pid in ${running[@]+"${running[@]}"}; do
        while is_alive "$pid" && [ "$SECONDS" -lt "$deadline" ]; do
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
    done
    running=()
}
trap end_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# train OPTIONS...: one training to its end. In the background, as a trap waits for what is in front.
train() {
    local status=0
    "$python" "$here/train_with_fleet.py" "$@" &
    running+=("$!")
    wait "$!" || status=$?
    unset 'running[-1]'
    [ "$status" -eq 0 ] || exit "$status"
}

# serve NUMBER: starts a teacher and waits until it is ready. Leaves its address in $address.
serve() {
    local said="$out/teacher$1.out" log="$out/teacher$1.log" pid device=(--thread 1)
    [ "$gpus" -eq 0 ] || device=(--gpu_ids "$((($1 - 1) % gpus))")
    "$python" -m distill_reader.serve --model "$out/mnist_cnn_model" --port 0 "${device[@]}" \
        >"$said" 2>"$log" &
    pid=$!
    running+=("$pid")
    address=""
    while [ -z "$address" ]; do
        is_alive "$pid" || { tail -n 15 "$log" >&2; die "the teacher has ended; its log is $log"; }
        sleep 0.1
        address="$(sed -n 's/^teacher ready on \([^ ]*\):.*/\1/p' "$said")"
    done
}

gpus="$(gpu_count)"
case "${use_gpu,,}" in
    n | no | f | false | off | 0) gpus=0 ;;
    *) [ "$gpus" -eq 0 ] || gpus="$("$python" -c \
        'import paddle; print(paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() or 0)')" ;;
esac

say "--- 1. the teacher, with all labels"
train ${shared[@]+"${shared[@]}"} --save_serving_model True --serving_model_dir "$out/mnist_cnn_model" \
    --json "$out/teacher.json" ${teacher[@]+"${teacher[@]}"}

say "--- 2. it is served"
addresses=""
for number in $(seq "$teachers"); do
    serve "$number"
    say "teacher $number: $address, log: $out/teacher$number.log"
    addresses="$addresses${addresses:+,}$address"
done

say "--- 3. a student, with what the teacher says of each image"
task=(--labelled 500 --batch_size 50 --num_epochs 60 --test_epochs 10 ${students[@]+"${students[@]}"})
train "${task[@]}" --use_distill_service True --distill_teachers "$addresses" \
    --no_teacher_timeout_s 60 --json "$out/distilled.json"

say "--- 4. the same student, without a teacher"
train "${task[@]}" --json "$out/alone.json"

end_all
"$python" - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

for name, text in (
    ("teacher", "teacher, with all labels"),
    ("distilled", "student with the teacher"),
    ("alone", "same student without"),
):
    told = json.loads(Path(sys.argv[1], f"{name}.json").read_text())
    print(f"{text:26}{told['model']:5}{100 * told['accuracy']:6.2f}% right")
PYTHON
