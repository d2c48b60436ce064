#!/usr/bin/env bash
# Distillation of texts in one command: trains a transformer with all labels, serves it, distils a bag of
# words that knows 200 of them, trains the same without a teacher, and ends the teacher. Minutes on a CPU.
#   ./run.sh                                       sentences of documentation that this machine has
#   ./run.sh --data_dir DIR                        DIR has train.txt and dev.txt: label<TAB>text
#   ./run.sh [STUDENT'S OPTIONS] [-- TEACHER'S]    options of train_student.py and train_teacher.py, which
#                                                  have --help; what the student is told of --use_gpu
#                                                  and --seed, the teacher is told as well. In the
#                                                  folders of --checkpoint and --model_save_dir each
#                                                  student has its own
# Honours TEACHERS (1: how many serve), EDL_PYTHON, EDL_STATE_DIR (edl_run; in it nlp_distill/ gets the
# texts, the teacher and the logs, of one run at a time).
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
shared=()
[ -z "$use_gpu" ] || shared+=("--use_gpu=$use_gpu")
seed="$(option seed "" ${students[@]+"${students[@]}"})"
[ -z "$seed" ] || shared+=("--seed=$seed")

ensure_python
make_state
out="$state/nlp_distill"
mkdir -p "$out"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # networks as small as these gain nothing by more
# shellcheck source-path=SCRIPTDIR source=../scripts/with_teachers.sh
source "$here/../scripts/with_teachers.sh"
only_one "$out"
need_teacher_packages distill
gpus="$(usable_gpus "$use_gpu")"

checkpoint="$(option checkpoint "" ${students[@]+"${students[@]}"})"
saved="$(option model_save_dir "" ${students[@]+"${students[@]}"})"
data="$(option data_dir "" ${students[@]+"${students[@]}"})"
if [ -z "$data" ]; then
    data="$out/text_data"
    students+=("--data_dir=$data")
    say "--- 0. texts"
    [ -e "$data/dev.txt" ] || train "$here/make_data.py" "$data"
fi
shared+=("--data_dir=$data")

say "--- 1. the teacher, with all labels"
train "$here/train_teacher.py" "${shared[@]}" --serving_model_dir "$out/text_teacher_model" \
    --json "$out/teacher.json" ${teacher[@]+"${teacher[@]}"}

say "--- 2. it is served"
addresses=""
for number in $(seq "$teachers"); do
    serve "$out/text_teacher_model" "$number" "$out"
    say "teacher $number: $address, log: $out/teacher$number.log"
    addresses="$addresses${addresses:+,}$address"
done

say "--- 3. a student, with what the teacher says of its texts, and of those without a label"
train "$here/train_student.py" --labelled 200 --unlabelled all ${students[@]+"${students[@]}"} \
    --use_distill_service True --distill_teachers "$addresses" --teacher_dir "$out/text_teacher_model" \
    --distill_cache "$out/soft_labels" --no_teacher_timeout_s 60 \
    ${checkpoint:+"--checkpoint=$checkpoint/distilled"} ${saved:+"--model_save_dir=$saved/distilled"} \
    --json "$out/distilled.json"

say "--- 4. the same student, without a teacher"
alone=() # without what is of no use to it
while [ ${#students[@]} -gt 0 ]; do
    case "${students[0]}" in
        --unlabelled | --unlabelled_file) students=("${students[@]:2}") ;;
        --unlabelled=* | --unlabelled_file=*) students=("${students[@]:1}") ;;
        *) alone+=("${students[0]}") && students=("${students[@]:1}") ;;
    esac
done
# More epochs: it has fewer texts.
train "$here/train_student.py" --labelled 200 --num_epochs 60 ${alone[@]+"${alone[@]}"} \
    ${checkpoint:+"--checkpoint=$checkpoint/alone"} ${saved:+"--model_save_dir=$saved/alone"} \
    --json "$out/alone.json"

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
    right = "trained before" if told["accuracy"] is None else f"{100 * told['accuracy']:.2f}% right"
    print(f"{text:26}{told['texts']:6} texts  {right}")
PYTHON
