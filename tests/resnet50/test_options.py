"""The original's command lines still parse, and wrong ones say what to change."""

import shlex

import pytest
from options import DIGITS, IMAGENET, MODELS, WITHOUT_MEANING, checkpoint_url, parse

# What the original's own train_pretrain.sh and train_gpu.sh pass, on a folder that exists.
ORIGINAL = shlex.split("""
--model=ResNet50 --batch_size=128 --total_images=1281167 --class_dim=1000 --image_shape=3,224,224
--model_save_dir=output/ --with_mem_opt=False --lr_strategy=piecewise_decay --lr=0.1 --l2_decay=1e-4
--scale_loss=1.0 --use_dynamic_loss_scaling=True --num_epochs=90 --num_threads=2 --nccl_comm_num=1
--fuse=True --use_hierarchical_allreduce=False --fp16=False --use_dali=False --use_dgc=False
--fetch_steps=10 --do_test=False --profile=False --rampup_begin_step=5008
--checkpoint=./fleet_checkpoints --use_recompute=False --fuse_bn_act_ops=False --data_format=NCHW
""")


def error_of(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    assert ended.value.code == 2
    return str(capsys.readouterr().err)


def test_the_original_command_line_is_understood(tmp_path):
    options = parse([*ORIGINAL, f"--data_dir={tmp_path}"])
    assert (options.batch_size, options.total_batch_size) == (128, None)
    assert options.image_shape == (3, 224, 224)
    assert options.do_test is False
    assert options.num_threads == 2
    assert (options.crop_size, options.resize_short_size) == (224, 256)


def test_each_option_without_meaning_is_told_with_its_reason_and_only_if_given(tmp_path):
    options = parse([*ORIGINAL, f"--data_dir={tmp_path}"])
    told = [line.partition("=")[0] for line in options.ignored]
    assert sorted(told) == [
        "--fuse",
        "--fuse_bn_act_ops",
        "--nccl_comm_num",
        "--profile",
        "--rampup_begin_step",
        "--use_dali",
        "--use_dgc",
        "--use_hierarchical_allreduce",
        "--use_recompute",
        "--with_mem_opt",
    ]
    assert "--fuse=True does nothing: gradients always go in one flat all-reduce" in options.ignored
    assert parse([]).ignored == []


@pytest.mark.parametrize("name", sorted(WITHOUT_MEANING))
def test_options_without_meaning_take_a_value_in_both_ways(name):
    assert len(parse([f"--{name}=1"]).ignored) == 1
    assert len(parse([f"--{name}", "1"]).ignored) == 1


def test_without_data_the_defaults_are_those_of_the_digits(tmp_path):
    digits, imagenet = parse([]), parse([f"--data_dir={tmp_path}"])
    assert {name: getattr(digits, name) for name in DIGITS} == DIGITS
    assert {name: getattr(imagenet, name) for name in IMAGENET} == IMAGENET
    assert parse(["--num_epochs=1"]).num_epochs == 1


def test_both_sets_of_defaults_name_the_same_options():
    assert DIGITS.keys() == IMAGENET.keys()


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--fp16"], True),
        (["--fp16=True"], True),
        (["--fp16", "true"], True),
        (["--fp16=1"], True),
        (["--fp16=False"], False),
        (["--fp16", "no"], False),
        ([], False),
    ],
)
def test_flags_are_read_as_the_original_read_them(argv, value):
    assert parse(argv).fp16 is value


@pytest.mark.parametrize("model", MODELS)
def test_each_model_can_be_chosen(model):
    assert parse([f"--model={model}"]).model == model


@pytest.mark.parametrize("name", ["cosine_warmup", "cosine_decay_warmup", "cosine_warmup_decay"])
def test_spellings_of_the_warmed_up_cosine_are_one(name):
    assert parse([f"--lr_strategy={name}"]).lr_strategy == "cosine_warmup_decay"


def test_a_total_batch_size_of_minus_one_is_the_original_for_not_given():
    assert parse(["--total_batch_size=-1"]).total_batch_size is None
    assert parse(["--total_batch_size", "1024"]).total_batch_size == 1024


def test_two_names_of_one_option_are_one():
    assert parse(["--reader_thread=3"]).num_threads == 3
    assert parse(["--random_seed=7"]).seed == 7


def test_visualdl_is_another_kind_of_log():
    tensorboard, visualdl = parse(["--log_dir=runs"]), parse(["--visualdl_dir=runs"])
    assert (tensorboard.log_dir, tensorboard.log_kind) == ("runs", "tensorboard")
    assert (visualdl.log_dir, visualdl.log_kind) == ("runs", "visualdl")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model=ResNet51"], "--model: got 'ResNet51'; choose one of ResNet18, ResNet18_vd"),
        (["--lr_strategy=exp"], "--lr_strategy: got 'exp'; choose one of piecewise_decay"),
        (["--data_format=HWC"], "--data_format: got 'HWC'; choose one of NCHW, NHWC"),
        (["--batch_size=0"], "--batch_size: expected a whole number of at least 1, got '0'"),
        (["--total_batch_size=-2"], "--total_batch_size: expected a whole number of at least 1"),
        (["--num_epochs=many"], "--num_epochs: expected a whole number of at least 1, got 'many'"),
        (["--lr=nan"], "--lr: expected a number above 0, got 'nan'"),
        (["--lr=inf"], "--lr: expected a number above 0, got 'inf'"),
        (["--lr=0"], "--lr: expected a number above 0, got '0'"),
        (["--momentum_rate=1.5"], "--momentum_rate: expected a number of at least 0 and at most 1"),
        (["--lower_scale=2"], "--lower_scale: expected a number above 0 and at most 1, got '2'"),
        (["--lower_ratio=3"], "--lower_ratio: 3 is above --upper_ratio 1.33333; exchange them"),
        (["--fp16=maybe"], "--fp16: expected True or False, got 'maybe'"),
        (["--image_shape=3,224"], "expected channels,height,width as 3,224,224; got '3,224'"),
        (["--image_shape=1,32,32"], "--image_shape: expected 3 channels, got '1,32,32'"),
        (["--image_shape=3,16,16"], "--image_shape: expected a square of at least 32 pixels"),
        (["--image_shape=3,64,32"], "--image_shape: expected a square of at least 32 pixels"),
        (["--crop_size=64"], "--crop_size: 64 is not the side of --image_shape, 32; leave it out"),
        (["--resize_short_size=20"], "--resize_short_size: 20 is less than the 32 pixels"),
        (["--interpolation=5"], "--interpolation: got 5; choose one of 0 to 4"),
        (["--decay_epochs", "60", "30"], "--decay_epochs: [60, 30] do not rise; sort them"),
        (["--image_std", "1", "0", "1"], "--image_std: [1.0, 0.0, 1.0] must all be above 0"),
        (["--data_dir=/no/such"], "--data_dir: /no/such is no folder; leave it out for the digits"),
        (["--pretrained_model=/no"], "--pretrained_model: /no is no file; give the .pdparams file"),
        (["--hdfs_name=hdfs://a:9000"], "--hdfs_name: needs --checkpoint, the path on it"),
        (["--num_threads=1", "--reader_thread=2"], "two names of one option: give one"),
        (["--learning_rate=1"], "unrecognized arguments: --learning_rate=1"),
    ],
)
def test_a_wrong_value_is_named_with_the_remedy(capsys, argv, said):
    assert said in error_of(capsys, *argv)


@pytest.mark.parametrize(
    ("checkpoint", "name", "ugi", "url"),
    [
        ("ckpt", None, None, "ckpt"),
        (None, None, None, None),
        ("/a/b", "hdfs://node:9000", "me,secret", "hdfs://me@node:9000/a/b"),
        ("a/b", "node:9000", None, "hdfs://node:9000/a/b"),
        ("a", "webhdfs://node:50070/", "me", "webhdfs://me@node:50070/a"),
        ("s3://bucket/run", "hdfs://node:9000", "me,secret", "s3://bucket/run"),
    ],
)
def test_a_checkpoint_on_hadoop_becomes_a_url_without_the_password(checkpoint, name, ugi, url):
    assert checkpoint_url(checkpoint, name, ugi) == url


def test_help_shows_both_defaults_where_they_differ(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "passes over the training images (120; digits: 5)" in shown
    assert "channels,height,width (3,224,224; digits: 3,32,32)" in shown
