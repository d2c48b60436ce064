#!/usr/bin/env bash
# What a pod runs: the launcher with one trainer for each of the pod's GPUs or CPU slots. Arguments go
# to train_student.py: `edl run` starts that itself, the job client this.
#   ../scripts/start_job_client.sh ./train.sh --data_dir "$PWD/text_data" --use_distill_service True \
#       --teacher_dir "$PWD/text_teacher_model" --distill_teachers HOST:PORT
# Name folders in full: a pod runs in a folder of its own.
# Honours PADDLE_EDL_FLEET_CHECKPOINT_PATH, the folder or URL of checkpoints: none are written without.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
checkpoint="${PADDLE_EDL_FLEET_CHECKPOINT_PATH:-}"

# Not `exec`: when the pod's shim is killed, this shell dies with it and the launcher lives on for the
# moment that it needs to clean up.
python -m pod_runtime.launch --log_dir "${EDL_POD_DIR:-log}/trainers" \
    "$here/train_student.py" ${checkpoint:+--checkpoint "$checkpoint"} "$@"
exit $?
