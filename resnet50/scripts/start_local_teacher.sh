#!/usr/bin/env bash
# Serve a teacher of images on this machine, in the background:
#   scripts/start_local_teacher.sh                      what PADDLE_EDL_TEACHER_MODEL names, else a small
#                                                       teacher of digits, trained first (minutes, once)
#   scripts/start_local_teacher.sh --model DIR ...      arguments go to `python -m distill_reader.serve`
#   scripts/start_local_teacher.sh --foreground         stays; --stop ends the one in the background
# Port 9898 unless --port says otherwise; all GPUs unless --gpu_ids does. Honours EDL_PYTHON, and
# EDL_STATE_DIR (edl_run) for the log, the pid file and the teacher of digits.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source-path=SCRIPTDIR source=../../scripts/lib.sh
source "$here/../scripts/lib.sh"
# shellcheck source-path=SCRIPTDIR source=../../scripts/background.sh
source "$here/../scripts/background.sh"

parse_arguments "$@"
if [ -n "$help" ]; then
    show_help distill_reader.serve
fi
if [ -n "$stop" ]; then
    stop_background teacher 60
    exit
fi
ensure_python
make_state
[ -n "$foreground" ] || one_at_a_time teacher
running="$(running_pid "$state/teacher.pid")"
if [ -n "$running" ]; then
    say "A teacher runs already (pid $running, log $state/teacher.log); end it with: $0 --stop"
    exit
fi

model="$(option model "${PADDLE_EDL_TEACHER_MODEL:-}" ${args[@]+"${args[@]}"})"
if [ -z "$model" ]; then
    model="$state/ResNet18_model"
    if [ ! -e "$model/serving_server_conf.prototxt" ]; then
        say "No --model and no PADDLE_EDL_TEACHER_MODEL: training a ResNet18 on handwritten digits first;" \
            "its log is $state/teacher_training.log"
        # Made under another name: half a teacher is none.
        (cd "$state" && "$python" "$here/train_with_fleet.py" --model=ResNet18 --lr=0.01 \
            --num_epochs="${EDL_TEACHER_EPOCHS:-5}" --save_serving_model=True --serving_model_dir="$model.new" \
            --model_save_dir="$state/output" >"$state/teacher_training.log" 2>&1 9>&-) ||
            { tail -n 15 "$state/teacher_training.log" >&2; die "the teacher could not be trained"; }
        rm -rf "$model"
        mv "$model.new" "$model"
        grep '^End pass' "$state/teacher_training.log" | tail -n 1 >&2
    fi
fi
port="$(option port 9898 ${args[@]+"${args[@]}"})"
device=()
case " ${args[*]-} " in
    *" --gpu_ids"*) ;;
    *)
        gpus="$(gpu_count)"
        [ "$gpus" -eq 0 ] || device=(--gpu_ids "$(seq -s , 0 $((gpus - 1)))")
        ;;
esac
# What was given comes last, and so counts; the folder may have come from the environment.
command=("$python" -m distill_reader.serve --port "$port" ${device[@]+"${device[@]}"} ${args[@]+"${args[@]}"})
case " ${args[*]-} " in *" --model "* | *" --model="*) ;; *) command+=(--model "$model") ;; esac
if [ -n "$foreground" ]; then
    exec "${command[@]}"
fi

: >"$state/teacher.log"
in_background teacher "${command[@]}"
ready=""
while [ -z "$ready" ]; do
    [ -n "$(running_pid "$state/teacher.pid")" ] || give_up teacher "has ended"
    sleep 0.1
    ready="$(sed -n 's/^teacher ready on \([^ ]*\):.*/\1/p' "$state/teacher.log")"
done
say "teacher: $ready, serves $model (pid $started_pid, log $state/teacher.log)"
where="$ready" token=""
case "$ready" in
    0.0.0.0:* | "[::]":*)  # it listens on all addresses: students use the one that others see
        where="$(hostname -I 2>/dev/null | cut -d ' ' -f 1)"
        case "$where" in *:*) where="[$where]" ;; esac
        where="${where:-$(hostname)}:${ready##*:}"
        token=", with the teacher's token in EDL_TEACHER_TOKEN"
        ;;
esac
say "its student: $here/scripts/train_student.sh --distill_teachers=$where$token; stop it: $0 --stop"
