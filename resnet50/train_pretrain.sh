#!/usr/bin/env bash
# What a pod runs, or you alone: ResNet50 on ImageNet, with the recipe for a total batch of 1024, or on
# handwritten digits where there is no ImageNet. Arguments go to train_with_fleet.py, after ours.
#   PADDLE_EDL_IMAGENET_PATH            the folder with train.txt and val.txt, or train/ and val/
#   PADDLE_EDL_FLEET_CHECKPOINT_PATH    folder or URL of the checkpoints
#   EDL_RECIPE                          another recipe than these two (scripts/train_student.sh)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# No proxy stands between trainers.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY
# cuDNN tries its algorithms once for each shape, and ours never change.
export FLAGS_cudnn_exhaustive_search="${FLAGS_cudnn_exhaustive_search:-1}"
export FLAGS_cudnn_batchnorm_spatial_persistent="${FLAGS_cudnn_batchnorm_spatial_persistent:-1}"

# Each pod has a folder of its own, and another one after it goes on: so beside the folders of all pods.
keep="$PWD${PADDLE_POD_ID:+/..}"
checkpoint="${PADDLE_EDL_FLEET_CHECKPOINT_PATH:-${EDL_CHECKPOINT:-$keep/fleet_checkpoints}}"
export EDL_CHECKPOINT="$checkpoint" # the launcher looks there for the highest stage

if [ -n "${PADDLE_EDL_IMAGENET_PATH:-}" ]; then
    recipe="${EDL_RECIPE:-recipes/resnet50_batch1024.sh}"
    echo "train_pretrain.sh: ImageNet in $PADDLE_EDL_IMAGENET_PATH, checkpoints in $checkpoint"
else
    recipe="${EDL_RECIPE:-recipes/digits.sh}"
    echo "train_pretrain.sh: PADDLE_EDL_IMAGENET_PATH is not set, so this trains handwritten digits" \
        "at 32 pixels; checkpoints in $checkpoint"
fi
source "$recipe" # sets `options`

launch=(python -m pod_runtime.launch --log_dir "${EDL_POD_DIR:-log}/trainers" --log_level 20
    train_with_fleet.py "${options[@]}"
    --checkpoint="$checkpoint" --model_save_dir="$keep/output" "$@")
# Alone, a SIGTERM is for the training, which writes a last checkpoint: this shell would only die of it.
[ -n "${PADDLE_JOBSERVER:-}" ] || exec "${launch[@]}"
# In a pod not `exec`: when the pod's shim is killed, this shell dies with it and the launcher lives on
# for the moment that it needs to clean up.
"${launch[@]}"
exit $?
