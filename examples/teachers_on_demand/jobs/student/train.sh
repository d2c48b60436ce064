#!/usr/bin/env bash
# A pod of the job "student": trainers that learn from whatever teachers the service has.
set -euo pipefail
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)"
export PADDLE_DISTILL_BALANCE_SERVER="$EDL_DISCOVERY" PADDLE_DISTILL_SERVICE_NAME=digits
export PADDLE_DISTILL_MAX_TEACHER=4
exec python -m pod_runtime.launch --log_dir log "$repository/mnist_distill/train_with_fleet.py" \
    --use_distill_service True --num_epochs "${EDL_EPOCHS:-300}" --test_epochs 20 --fetch_steps 500 \
    --checkpoint "$EDL_CHECKPOINT"
