# ResNet50 on ImageNet to 75.5 % acc1 and 92.8 % acc5: a total batch of 1024 for 90 epochs. Sourced by
# train_pretrain.sh. The same for 8 GPUs (128 images each) and for 16 (64 each, two nodes of 8): the
# total batch is what counts, and it does not change when trainers come and go.
#
# lr: 0.1 is meant for a batch of 256; piecewise_decay multiplies it by 1024 / 256, so that it is 0.4
# after five epochs of warm-up, and a tenth of the last at the epochs 30, 60 and 80.
# shellcheck disable=SC2034
options=(
    --model=ResNet50
    --data_dir="$PADDLE_EDL_IMAGENET_PATH"
    --total_batch_size=1024
    --class_dim=1000
    --image_shape=3,224,224
    --num_epochs=90
    --lr_strategy=piecewise_decay
    --lr=0.1
    --warmup_epochs=5
    --decay_epochs 30 60 80
    --momentum_rate=0.9
    --l2_decay=1e-4
    --do_test=True
    --save_steps=500
)
