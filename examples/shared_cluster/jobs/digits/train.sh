#!/usr/bin/env bash
# A pod of any job whose file says `folder: digits`. Each job has a folder of checkpoints of its own.
set -euo pipefail
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)"
exec python -m pod_runtime.launch --log_dir log "$repository/examples/digits/train.py" \
    --epochs "${EDL_EPOCHS:-40}" --checkpoint "$EDL_CHECKPOINTS/$PADDLE_JOB_ID"
