"""What an image becomes: measured against Paddle's own transforms where they have the same."""

import random
import struct

import numpy as np
import paddle
import paddle.vision.transforms.functional as functional
import pytest
import transforms
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transforms import (
    BROKEN_IMAGE,
    Recipe,
    center_crop_box,
    decode,
    load_crop,
    mixup,
    random_crop_box,
    reduction,
    spread,
)

from tests.resnet50.conftest import encoded, picture

BILINEAR = Image.Resampling.BILINEAR
RATIO = (3 / 4, 4 / 3)
sides = st.integers(1, 2000)


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(np.int64)


def whole(encoded_image: bytes, size: tuple[int, int]) -> np.ndarray:
    """Return all of an image, resized."""
    return pixels(load_crop(encoded_image, lambda found: (0, 0, *found), size, BILINEAR))


# --- where to crop


@given(sides, sides, st.integers(0, 2**32))
def test_a_random_crop_lies_within_the_image(width, height, seed):
    left, top, right, bottom = random_crop_box(
        (width, height), (0.08, 1.0), RATIO, random.Random(seed)
    )
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


@given(st.integers(100, 2000), st.integers(100, 2000), st.integers(0, 2**32))
def test_a_random_crop_has_the_area_and_the_ratio_that_were_asked_for(width, height, seed):
    left, top, right, bottom = random_crop_box(
        (width, height), (0.2, 0.3), RATIO, random.Random(seed)
    )
    w, h = right - left, bottom - top
    if max(width, height) < 2 * min(width, height):  # else ten draws need not fit
        assert 0.19 <= w * h / (width * height) <= 0.31
    assert 0.73 <= w / h <= 1.37


def test_random_crops_come_from_all_over_the_image():
    draw = random.Random(1)
    boxes = [random_crop_box((400, 300), (0.08, 1.0), RATIO, draw) for _ in range(500)]
    areas = [(b[2] - b[0]) * (b[3] - b[1]) / 120_000 for b in boxes]
    assert min(areas) < 0.1
    assert max(areas) > 0.9
    assert 0.4 < np.mean(areas) < 0.6
    assert min(b[0] for b in boxes) <= 2
    assert max(b[2] for b in boxes) >= 398


@pytest.mark.parametrize(
    ("size", "box"),
    [
        pytest.param((1000, 20), (486.5, 0, 513.5, 20), id="a strip: its middle, as wide as 4/3"),
        pytest.param((20, 1000), (0, 486.5, 20, 513.5), id="upright"),
        pytest.param((1, 1), (0, 0, 1, 1), id="one pixel"),
    ],
)
def test_an_image_in_which_no_crop_fits_gives_its_centre(size, box):
    # Of the whole area, at these ratios, nothing fits into a strip.
    assert random_crop_box(size, (0.99, 1.0), RATIO, random.Random(1)) == box


@pytest.mark.parametrize(
    ("size", "crop", "short", "box"),
    [
        pytest.param((256, 256), (224, 224), 256, (16, 16, 240, 240), id="no resize needed"),
        pytest.param((512, 512), (224, 224), 256, (32, 32, 480, 480), id="half"),
        pytest.param((512, 256), (224, 224), 256, (144, 16, 368, 240), id="wide"),
        pytest.param((100, 100), (224, 224), 224, (0, 0, 100, 100), id="enlarged"),
        pytest.param((100, 100), (200, 50), 100, (0, 37.5, 100, 62.5), id="oblong: resized more"),
    ],
)
def test_the_centre_crop_in_the_pixels_of_the_image(size, crop, short, box):
    assert center_crop_box(size, crop, short) == pytest.approx(box)


@given(sides, sides, st.integers(1, 300))
def test_a_centre_crop_lies_within_the_image(width, height, crop):
    left, top, right, bottom = center_crop_box((width, height), (crop, crop), crop * 8 // 7)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


@given(sides, sides, sides)
def test_decoding_on_a_smaller_scale_leaves_enough_pixels(width, height, side):
    factor = reduction((0, 0, width, height), (side, side))
    assert factor in (1, 2, 4, 8)
    if factor > 1:
        assert min(width, height) / factor >= side
    if factor < 8:
        assert min(width, height) / (2 * factor) < side


# --- decoding


@pytest.mark.parametrize("side", [30, 60, 100, 239])
def test_a_jpeg_decoded_on_a_smaller_scale_looks_the_same(monkeypatch, side):
    image = encoded(picture(480, 400), quality=95)
    box = (41, 30, 41 + 240, 30 + 240)
    scaled = pixels(load_crop(image, lambda _: box, (side, side), BILINEAR))
    monkeypatch.setattr(transforms, "reduction", lambda *_: 1)
    full = pixels(load_crop(image, lambda _: box, (side, side), BILINEAR))
    assert np.abs(scaled - full).max() <= 4  # of 255
    # And it was on a smaller scale, where that can be: bits differ.
    assert np.array_equal(scaled, full) is (side > 120)


def test_a_crop_is_what_paddle_crops_and_resizes():
    image = picture(300, 200)
    mine = load_crop(encoded(image, "PNG"), lambda _: (20, 10, 220, 190), (64, 64), BILINEAR)
    theirs = functional.resize(functional.crop(image, 10, 20, 180, 200), (64, 64), "bilinear")
    assert np.abs(pixels(mine) - pixels(theirs)).max() <= 1


def test_an_evaluation_sample_is_what_paddle_makes_of_it(make_options):
    image = picture(300, 200)
    recipe = Recipe.of(make_options(image_shape=(3, 64, 64), resize_short_size=73))
    small = functional.center_crop(functional.resize(image, 73, "bilinear"), 64)
    theirs = functional.normalize(
        functional.to_tensor(small), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    ).numpy()
    mine = recipe.evaluate(encoded(image, "PNG"))
    assert mine.dtype == theirs.dtype == np.float32
    assert mine.shape == theirs.shape
    # Half a pixel off at the most, as theirs is resized to whole pixels first.
    assert np.abs(mine - theirs).mean() < 0.05


def test_pixels_become_numbers_as_in_paddle(make_options):
    image = picture(32, 32)
    recipe = Recipe.of(make_options())
    theirs = functional.normalize(
        functional.to_tensor(image), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    ).numpy()
    mine = recipe.to_array(image)
    np.testing.assert_allclose(mine, theirs, atol=1e-5)
    np.testing.assert_array_equal(recipe.to_array(image, mirrored=True), mine[:, :, ::-1])
    last = Recipe.of(make_options(data_format="NHWC")).to_array(image)
    np.testing.assert_array_equal(last, mine.transpose(1, 2, 0))
    assert last.flags.c_contiguous


RED, GREY = (250, 10, 10), (90, 90, 90)


@pytest.mark.parametrize(
    ("image", "kind", "colour"),
    [
        pytest.param(Image.new("RGB", (40, 30), RED), "JPEG", RED, id="colour"),
        pytest.param(Image.new("L", (40, 30), 90), "JPEG", GREY, id="grey JPEG"),
        pytest.param(Image.new("L", (40, 30), 90), "PNG", GREY, id="grey PNG"),
        pytest.param(Image.new("CMYK", (40, 30), (5, 245, 245, 0)), "JPEG", RED, id="CMYK"),
        pytest.param(Image.new("RGB", (40, 30), RED).quantize(4), "PNG", RED, id="palette"),
        pytest.param(Image.new("RGB", (40, 30), RED).quantize(4), "GIF", RED, id="GIF"),
        pytest.param(Image.new("RGBA", (40, 30), (*RED, 128)), "PNG", RED, id="transparent"),
        pytest.param(Image.new("LA", (40, 30), (90, 0)), "PNG", GREY, id="transparent grey"),
        pytest.param(Image.new("1", (40, 30), 1), "PNG", (255, 255, 255), id="one bit"),
        pytest.param(
            Image.fromarray(np.full((30, 40), 90 * 257, np.uint16)), "PNG", GREY, id="16 bits"
        ),
        pytest.param(Image.new("RGB", (40, 30), RED), "WEBP", RED, id="WebP"),
    ],
)
@pytest.mark.parametrize("side", [8, 100])
def test_images_of_all_kinds_come_out_in_their_colour(image, kind, colour, side):
    found = whole(encoded(image, kind), (side, side))
    assert found.shape == (side, side, 3)
    assert np.abs(found - np.array(colour)).max() <= 12  # JPEG and WebP lose some
    decode(encoded(image, kind))


# --- EXIF: cameras write how they were held


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_upright(orientation):
    upright = picture(96, 64, seed=3)
    back = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    held = upright if back is None else upright.transpose(back)
    exif = Image.Exif()
    exif[0x0112] = orientation
    seen = []

    def choose(size):
        seen.append(size)
        return (0, 0, *size)

    found = load_crop(encoded(held, exif=exif, quality=95), choose, (24, 16), BILINEAR)
    assert seen == [(96, 64)]
    assert np.abs(pixels(found) - pixels(upright.resize((24, 16), BILINEAR))).mean() < 3


@pytest.mark.parametrize(
    "exif",
    [
        pytest.param(b"Exif\x00\x00garbage that is no TIFF", id="no TIFF"),
        pytest.param(b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff", id="cut off"),
        pytest.param(
            b"Exif\x00\x00II*\x00\x08\x00\x00\x00\x01\x00"
            + struct.pack("<HHII", 0x0112, 3, 1, 77)
            + bytes(4),
            id="orientation 77",
        ),
    ],
)
def test_damaged_exif_data_do_not_matter(exif):
    image = picture(40, 30)
    assert np.array_equal(
        whole(encoded(image, exif=exif), (20, 20)), whole(encoded(image), (20, 20))
    )


# --- broken files


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
@pytest.mark.parametrize("keep", [0.0, 0.02, 0.5, 0.9])
def test_a_file_that_is_cut_off_raises_one_of_the_errors_of_broken_images(kind, keep):
    noisy = Image.fromarray(np.random.RandomState(1).randint(0, 256, (64, 64, 3), np.uint8))
    data = encoded(noisy, kind)
    with pytest.raises(BROKEN_IMAGE):
        decode(data[: int(len(data) * keep)])


@given(st.binary(max_size=200), st.sampled_from([b"", b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n"]))
def test_garbage_raises_one_of_the_errors_of_broken_images(data, start):
    with pytest.raises(BROKEN_IMAGE):
        decode(start + data)


# --- randomness


def test_a_sample_is_a_function_of_the_stream_alone(make_options):
    recipe = Recipe.of(make_options())
    image = encoded(picture(200, 150))
    made = []
    for seed in (1, 1, 2):
        random.seed(seed)
        made.append(recipe.augment(image))
    np.testing.assert_array_equal(made[0], made[1])
    assert not np.array_equal(made[0], made[2])


def test_half_of_the_samples_are_mirrored(make_options):
    ramp = np.repeat(np.arange(64, dtype=np.uint8)[None, :, None] * 4, 64, axis=0).repeat(3, axis=2)
    recipe = Recipe.of(make_options())
    image = encoded(Image.fromarray(ramp), "PNG")
    draw = random.Random(0)
    rising = sum(
        made[0, 0, -1] > made[0, 0, 0] for made in (recipe.augment(image, draw) for _ in range(200))
    )
    assert 70 < rising < 130


# --- mixup


@pytest.mark.parametrize("tensors", [False, True])
def test_mixup_mixes_images_and_says_with_which(tensors):
    images = np.arange(8, dtype=np.float32).reshape(4, 2)
    labels = np.arange(4)
    given_ = (paddle.to_tensor(images), paddle.to_tensor(labels)) if tensors else (images, labels)
    np.random.seed(3)
    mixed, one, other, lam = mixup(*given_, 0.2)
    mixed, one, other = (np.asarray(each) for each in (mixed, one, other))
    assert 0 <= lam <= 1
    assert mixed.dtype == np.float32
    assert one.tolist() == [0, 1, 2, 3]
    assert sorted(other.tolist()) == [0, 1, 2, 3]
    np.testing.assert_allclose(mixed, images * lam + images[other] * (1 - lam), rtol=1e-6)
    np.random.seed(3)
    again = mixup(*given_, 0.2)
    assert again[3] == lam
    np.testing.assert_array_equal(np.asarray(again[0]), mixed)


def test_the_weights_of_mixup_are_of_the_beta_distribution():
    draw = np.random.RandomState(1)
    images, labels = np.zeros((2, 1), np.float32), np.zeros(2)
    found = np.array([mixup(images, labels, 0.2, draw)[3] for _ in range(4000)])
    assert abs(found.mean() - 0.5) < 0.03
    assert abs(found.var() - 0.25 / 1.4) < 0.01  # 1 / (4 (2 alpha + 1))


@pytest.mark.parametrize("alpha", [0, -1, float("nan")])
def test_mixup_without_mixing_is_refused(alpha):
    with pytest.raises(ValueError, match=r"mixup_alpha: must be above 0"):
        mixup(np.zeros((2, 1)), np.zeros(2), alpha)


# --- options


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"interpolation": 7}, r"interpolation: 7 is none of 0, 1, 2, 3, 4"),
        ({"data_format": "CHWN"}, r"data_format: expected NCHW or NHWC, got 'CHWN'"),
        ({"resize_short_size": 20}, r"resize_short_size: 20 is less than the crop's 32"),
        ({"image_shape": (3, 0, 0)}, r"image_shape: sides must be at least 1"),
        ({"lower_scale": 1.5}, r"lower_scale: must be above 0 and at most 1, got 1.5"),
        ({"lower_ratio": 2.0}, r"lower_ratio, upper_ratio: .* in this order, got \(2.0, "),
        ({"image_std": [1, 0, 1]}, r"image_mean, image_std: three numbers each"),
        ({"image_mean": [1]}, r"image_mean, image_std: three numbers each"),
    ],
)
def test_wrong_options_are_named(make_options, changes, text):
    with pytest.raises(ValueError, match=text):
        Recipe.of(make_options(**changes))


def test_opencvs_numbers_of_interpolations_are_understood(make_options):
    names = [Recipe.of(make_options(interpolation=n)).resample.name for n in (None, 0, 1, 2, 3, 4)]
    assert names == ["BILINEAR", "NEAREST", "BILINEAR", "BICUBIC", "BOX", "LANCZOS"]


def test_fewer_images_are_spread_over_all_of_them(caplog):
    assert spread(10, None) == spread(10, 10) == slice(None)
    assert not caplog.records
    assert spread(10, 5).tolist() == [0, 2, 4, 6, 8]
    assert "training on 5 of 10 images" in caplog.text
    assert spread(10, 11) == slice(None)
    assert "total_images: 11, but there are only 10" in caplog.text
