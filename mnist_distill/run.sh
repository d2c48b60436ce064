#!/usr/bin/env bash
# Service distillation in one command: trains a teacher, serves it, distils a small student, trains the
# same student without a teacher, compares the two, and ends the teacher. A few minutes on a CPU.
#   ./run.sh --data_dir DIR                        DIR has MNIST's four files; without it: smaller digits
#   ./run.sh [STUDENT'S OPTIONS] [-- TEACHER'S]    options of train_with_fleet.py, which has --help; what
#                                                  the student is told of --data_dir, --use_gpu and
#                                                  --seed, the teacher is told as well. In the folders
#                                                  of --checkpoint and of --serving_model_dir, for
#                                                  --save_serving_model, each student has its own
# Honours TEACHERS (1: how many serve), EDL_PYTHON, EDL_STATE_DIR (edl_run; in it mnist_distill/ gets the
# teacher and the logs, of one run at a time).
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
checkpoint="$(option checkpoint "" ${students[@]+"${students[@]}"})"
saved="$(option serving_model_dir mnist_student_model ${students[@]+"${students[@]}"})"

ensure_python
make_state
out="$state/mnist_distill"
mkdir -p "$out"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # networks as small as these gain nothing by more

# shellcheck source-path=SCRIPTDIR source=../scripts/with_teachers.sh
source "$here/../scripts/with_teachers.sh"
only_one "$out"
need_teacher_packages distill,examples
gpus="$(usable_gpus "$use_gpu")"

say "--- 1. the teacher, with all labels"
train "$here/train_with_fleet.py" ${shared[@]+"${shared[@]}"} --save_serving_model True --serving_model_dir "$out/mnist_cnn_model" \
    --json "$out/teacher.json" ${teacher[@]+"${teacher[@]}"}

say "--- 2. it is served"
addresses=""
for number in $(seq "$teachers"); do
    serve "$out/mnist_cnn_model" "$number" "$out"
    say "teacher $number: $address, log: $out/teacher$number.log"
    addresses="$addresses${addresses:+,}$address"
done

say "--- 3. a student, with what the teacher says of each image"
task=(--labelled 500 --batch_size 50 --num_epochs 60 --test_epochs 10 ${students[@]+"${students[@]}"})
train "$here/train_with_fleet.py" "${task[@]}" --use_distill_service True --distill_teachers "$addresses" \
    ${checkpoint:+"--checkpoint=$checkpoint/distilled"} --serving_model_dir "$saved/distilled" \
    --no_teacher_timeout_s 60 --json "$out/distilled.json"

say "--- 4. the same student, without a teacher"
train "$here/train_with_fleet.py" "${task[@]}" ${checkpoint:+"--checkpoint=$checkpoint/alone"} \
    --serving_model_dir "$saved/alone" --json "$out/alone.json"

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
    right = "trained before" if told["accuracy"] is None else f"{100 * told['accuracy']:6.2f}% right"
    print(f"{text:26}{told['model']:5}{right}")
PYTHON
