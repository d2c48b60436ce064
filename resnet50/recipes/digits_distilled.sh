# A small student of a small teacher on handwritten digits, for a look without data and without a GPU.
# Sourced by train_pretrain.sh; what is not said here is the default without --data_dir.
# shellcheck disable=SC2034
options=(
    --model=ResNet18_vd
    --use_distill_service=True
    --lr=0.01
    --save_steps=50
)
