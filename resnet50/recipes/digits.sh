# Handwritten digits at 32 pixels, for a look without data and without a GPU. Sourced by
# train_pretrain.sh; what is not said here is the default of train_with_fleet.py without --data_dir.
# shellcheck disable=SC2034
options=(
    --model=ResNet50
    --save_steps=50
)
