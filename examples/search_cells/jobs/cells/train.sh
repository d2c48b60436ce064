#!/usr/bin/env bash
# A pod of any trial. Each has a folder of checkpoints of its own; its parameters come as arguments.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
exec python -m pod_runtime.launch --log_dir log "$here/../../train.py" \
    --checkpoint "$EDL_CHECKPOINTS/$PADDLE_JOB_ID" "$@"
