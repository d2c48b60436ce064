#!/usr/bin/env bash
# A pod of the job "teachers": serves a model where the job server says, and registers with discovery.
# EDL_MODEL and EDL_DISCOVERY come from the environment of the job client; the other EDL_ from the job.
set -euo pipefail
device=(--thread 1)
[ "$EDL_SLOT_KIND" = cpu ] || device=(--gpu_ids 0) # the pod's own GPUs are counted from 0
exec python -m distill_reader.serve --model "$EDL_MODEL" "${device[@]}" \
    --bind "$EDL_ADDR" --port "$EDL_PORT" --register "$EDL_DISCOVERY" --service_name "$EDL_SERVICE"
