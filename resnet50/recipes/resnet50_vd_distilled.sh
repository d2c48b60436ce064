# ResNet50_vd taught by ResNeXt101_32x16d_wsl on ImageNet: a total batch of 256 (8 GPUs, 32 images
# each). The original reports 79.0 % acc1 and 94.5 % acc5 for it, and 77.1 % and 93.5 % for the same
# student alone (--use_distill_service=False). Sourced by train_pretrain.sh.
#
# lr: 0.1 is meant for a batch of 256. Epochs, decay and momentum are the original's defaults; its
# table does not name them.
# shellcheck disable=SC2034
options=(
    --model=ResNet50_vd
    --use_distill_service=True
    --data_dir="$PADDLE_EDL_IMAGENET_PATH"
    --total_batch_size=256
    --class_dim=1000
    --image_shape=3,224,224
    --num_epochs=120
    --lr_strategy=cosine_warmup_decay
    --lr=0.1
    --warmup_epochs=5
    --momentum_rate=0.9
    --l2_decay=1e-4
    --do_test=True
    --save_steps=1000
)
