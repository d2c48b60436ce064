"""The networks have the shape that their papers say, in both data formats."""

import math

import paddle
import pytest
from networks import ResNetVd, load_pretrained, make_network, use_channels_last
from options import MODELS, parse
from paddle.vision import models

from edl.option_types import OptionError


def network_of(model: str, *more: str):
    return make_network(parse([f"--model={model}", *more]))


@pytest.fixture(scope="module")
def small():
    """Two images of 32 pixels, as NCHW."""
    paddle.seed(1)
    return paddle.randn([2, 3, 32, 32])


# Millions of parameters with 1000 classes, as published: torchvision's and PaddleClas' tables.
@pytest.mark.parametrize(
    ("model", "millions"),
    [
        ("ResNet50", 25.56),
        ("ResNet50_vd", 25.58),
        ("ResNeXt101_32x16d", 194.03),
        ("VGG11", 132.86),
        ("VGG13", 133.05),
        ("VGG16", 138.36),
        ("VGG19", 143.67),
    ],
)
def test_a_network_has_as_many_parameters_as_published(model, millions):
    assert model in MODELS
    with paddle.LazyGuard():  # shapes without numbers
        network = network_of(model, "--class_dim=1000")
    trained = sum(math.prod(each.shape) for each in network.parameters() if each.trainable)
    assert trained / 1e6 == pytest.approx(millions, abs=0.03)


@pytest.mark.parametrize("model", ["ResNet50_vd", "VGG11"])
def test_both_data_formats_compute_the_same_from_the_same_weights(model, small):
    first, last = network_of(model), network_of(model, "--data_format=NHWC")
    last.set_state_dict(first.state_dict())
    first.eval()
    last.eval()
    with paddle.no_grad():
        scores = first(small)
        assert scores.shape == [2, 10]
        same = last(small.transpose([0, 2, 3, 1]))
    assert paddle.allclose(scores, same, rtol=1e-4, atol=1e-5)
    assert not paddle.allclose(scores[0], scores[1])


def test_no_layer_of_a_channels_last_network_is_left_in_the_other_format():
    network = network_of("ResNet50_vd", "--data_format=NHWC")
    formats = {
        getattr(layer, name)
        for layer in network.sublayers()
        for name in ("_data_format", "data_format")
        if hasattr(layer, name)
    }
    assert formats == {"NHWC"}


@pytest.mark.parametrize("side", [32, 56, 75])
def test_resnet_d_takes_odd_sides(side):
    network = ResNetVd(50, 10)
    network.eval()
    assert network(paddle.zeros([1, 3, side, side])).shape == [1, 10]


def test_resnet_d_skips_no_pixel_in_its_shortcuts():
    network = ResNetVd(50, 10)
    for stage in (network.layer2, network.layer3, network.layer4):
        pool, convolution, _norm = stage[0].downsample
        assert (pool.ksize, pool.stride) == (2, 2)
        assert convolution._stride == [1, 1]
    assert network.layer1[0].downsample[0]._stride == [1, 1]


def test_a_pretrained_file_is_taken_over_and_a_head_of_another_size_is_told(tmp_path):
    path = str(tmp_path / "model.pdparams")
    source = models.resnet50(num_classes=7)
    paddle.save(source.state_dict(), path)
    network = network_of("ResNet50")
    head = network.fc.weight.clone()

    told = load_pretrained(network, path)

    assert told == (
        f"265 of 267 weights from {path}; not in it, or of another shape, and left as made: "
        f"fc.bias, fc.weight"
    )
    assert paddle.equal_all(network.layer3[1].conv2.weight, source.layer3[1].conv2.weight)
    assert paddle.equal_all(network.fc.weight, head)


def test_a_pretrained_file_of_the_same_network_fits_whole_also_for_nhwc(tmp_path):
    path = str(tmp_path / "model.pdparams")
    paddle.save(network_of("ResNet50").state_dict(), path)
    told = load_pretrained(network_of("ResNet50", "--data_format=NHWC"), path)
    assert told == f"267 of 267 weights from {path}"


def test_a_pretrained_file_that_does_not_fit_is_refused(tmp_path):
    network = paddle.nn.Linear(2, 3)
    other, broken, number = (str(tmp_path / name) for name in ("other", "broken", "number"))
    paddle.save(paddle.nn.Linear(5, 7).state_dict(), other)
    (tmp_path / "broken").write_bytes(b"no pickle")
    paddle.save(7, number)
    with pytest.raises(OptionError, match=r"none of the 2 weights .* give the same --model"):
        load_pretrained(network, other)
    with pytest.raises(OptionError, match=r"--pretrained_model: .*broken cannot be read"):
        load_pretrained(network, broken)
    with pytest.raises(OptionError, match=r"holds a int; give a file that paddle.save"):
        load_pretrained(network, number)


def test_making_channels_last_leaves_layers_without_a_format_alone():
    network = paddle.nn.Sequential(paddle.nn.Linear(2, 3))
    use_channels_last(network)
    assert network(paddle.zeros([1, 2])).shape == [1, 3]
