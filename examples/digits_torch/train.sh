#!/usr/bin/env bash
# What a pod runs. The launcher starts one trainer for each of the pod's GPUs or CPU slots.
set -euo pipefail
exec python -m pod_runtime.launch --log_dir "${EDL_POD_DIR:-.}/trainers" \
    "$(dirname "${BASH_SOURCE[0]}")/train.py" "$@"
