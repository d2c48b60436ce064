"""Turn an image's bytes into the network's input, at little more than the cost of decoding.

The crop is chosen from the size in the file's header, before anything is decoded. So a JPEG is
decoded at a half, a quarter or an eighth of its size where the crop allows it, and one pass crops,
resizes and filters. `paddle.vision.transforms` has the same operations for images that are decoded
already; the tests compare with them.
"""

import io
import logging
import math
import random
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps

logger = logging.getLogger(__name__)

Size = tuple[int, int]  # width, height: PIL's order
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels

# The original's numbers are OpenCV's. PIL filters over all pixels that go into one of the result,
# where OpenCV, but for AREA, takes the nearest few: ours are smoother when they shrink an image.
INTERPOLATIONS = {
    0: Image.Resampling.NEAREST,
    1: Image.Resampling.BILINEAR,
    2: Image.Resampling.BICUBIC,
    3: Image.Resampling.BOX,  # AREA
    4: Image.Resampling.LANCZOS,
}
# What Pillow raises for files that are none of its own, cut off or damaged.
BROKEN_IMAGE = (
    OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, OverflowError,
    MemoryError, struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip
_ORIENTATION = 0x0112  # EXIF: how the camera was held
_SIDEWAYS = 5  # orientations from here on swap width and height


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is done to each image. Made once, used by all workers."""

    size: Size  # of the result
    resize_short: int  # evaluation: the short side is resized to this, then cropped to `size`
    area: tuple[float, float]  # training: part of the image's area that a crop takes
    ratio: tuple[float, float]  # training: width / height of a crop
    resample: Image.Resampling
    mean: tuple[float, ...]  # by channel, of values in [0, 1]
    std: tuple[float, ...]
    channels_last: bool  # HWC instead of CHW
    raw: bool = False  # pixels as they are, uint8, instead of normalized floats

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ValueError(f"image_shape: sides must be at least 1, got {self.size}")
        if self.resize_short < min(self.size):
            raise ValueError(
                f"resize_short_size: {self.resize_short} is less than the crop's "
                f"{min(self.size)}; give at least that"
            )
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ValueError(f"lower_scale: must be above 0 and at most 1, got {self.area[0]}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(
                f"lower_ratio, upper_ratio: must be above 0 and in this order, got {self.ratio}"
            )
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(
                f"image_mean, image_std: three numbers each, and no deviation of 0, got "
                f"{self.mean} and {self.std}"
            )

    @classmethod
    def of(cls, options: Any) -> "Recipe":
        """Return what the command line asks for.

        Raises:
            ValueError: a value is wrong; the text names it and the remedy.
        """
        _channels, height, width = options.image_shape
        number = 1 if options.interpolation is None else options.interpolation
        if number not in INTERPOLATIONS:
            raise ValueError(
                f"interpolation: {number} is none of {', '.join(map(str, INTERPOLATIONS))}, which "
                f"are nearest, linear, cubic, area and Lanczos, as OpenCV numbers them"
            )
        if options.data_format not in ("NCHW", "NHWC"):
            raise ValueError(f"data_format: expected NCHW or NHWC, got {options.data_format!r}")
        return cls(
            size=(width, height),
            resize_short=options.resize_short_size,
            area=(options.lower_scale, 1.0),
            ratio=(options.lower_ratio, options.upper_ratio),
            resample=INTERPOLATIONS[number],
            mean=tuple(options.image_mean),
            std=tuple(options.image_std),
            # Teachers take CHW: what is read for them is turned behind them.
            channels_last=options.data_format == "NHWC" and not options.use_distill_service,
            raw=options.use_distill_service and options.distill_wire_dtype == "uint8",
        )

    def augment(self, encoded: bytes, rng: Any = random) -> np.ndarray:
        """Return a random crop, perhaps mirrored: float32 (uint8 if `raw`), CHW or HWC.

        Args:
            rng: draws; the elastic loop seeds Python's own generator for each sample of each epoch.

        Raises:
            BROKEN_IMAGE: the file cannot be decoded.
        """
        image = load_crop(
            encoded,
            lambda size: random_crop_box(size, self.area, self.ratio, rng),
            self.size,
            self.resample,
        )
        return self.to_array(image, mirrored=rng.random() < 0.5)

    def evaluate(self, encoded: bytes) -> np.ndarray:
        """Return the centre: float32, CHW or HWC. Raises what `augment` does."""
        image = load_crop(
            encoded,
            lambda size: center_crop_box(size, self.size, self.resize_short),
            self.size,
            self.resample,
        )
        return self.to_array(image)

    def to_array(self, image: Image.Image, *, mirrored: bool = False) -> np.ndarray:
        """Return (value / 255 - mean) / std of an RGB image of (W, H): (3, H, W) or (H, W, 3).

        Where the recipe is `raw`: the values themselves, as uint8.
        """
        pixels = np.asarray(image)
        if mirrored:
            pixels = pixels[:, ::-1]  # read backwards below; nothing is copied
        if self.raw:
            return np.ascontiguousarray(pixels if self.channels_last else pixels.transpose(2, 0, 1))
        mean, std = (np.array(each, np.float32)[:, None, None] for each in (self.mean, self.std))
        # Plane by plane, in place: several times as fast as (H, W, 3) with its short last axis.
        planes = pixels.transpose(2, 0, 1).astype(np.float32, order="C")
        planes *= 1 / (255 * std)
        planes -= mean / std
        return np.ascontiguousarray(planes.transpose(1, 2, 0)) if self.channels_last else planes


def random_crop_box(
    size: Size, area: tuple[float, float], ratio: tuple[float, float], rng: Any = random
) -> Box:
    """Return a crop of random area and aspect ratio (Szegedy et al. 2015, arXiv 1409.4842).

    Where ten draws do not fit into the image: its centre, as large as the ratios allow.
    """
    width, height = size
    for _ in range(10):
        target = rng.uniform(*area) * width * height
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.randint(0, width - w), rng.randint(0, height - h)
            return left, top, left + w, top + h
    w = min(width, max(1, round(height * ratio[1])))
    h = min(height, max(1, round(width / ratio[0])))
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h


def center_crop_box(size: Size, crop: Size, resize_short: int) -> Box:
    """Return what a centre crop takes of an image whose short side is first resized.

    In the image's own pixels, so that both are done at once. An image that is too narrow for an
    oblong crop is resized more than asked.
    """
    width, height = size
    scale = max(resize_short / min(size), crop[0] / width, crop[1] / height)
    w, h = min(width, crop[0] / scale), min(height, crop[1] / scale)
    left, top = (width - w) / 2, (height - h) / 2
    return left, top, left + w, top + h


def reduction(box: Box, size: Size) -> int:
    """Return by how much a JPEG may be shrunk in decoding, 1, 2, 4 or 8, and still fill `size`."""
    room = min((box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1])
    return next((factor for factor in (8, 4, 2) if factor <= room), 1)


def load_crop(
    encoded: bytes, choose_box: Callable[[Size], Box], size: Size, resample: Image.Resampling
) -> Image.Image:
    """Return the part of an image that `choose_box` takes, as RGB of `size`.

    Args:
        choose_box: called with the size of the upright image.

    Raises:
        BROKEN_IMAGE: the file cannot be decoded.
    """
    with warnings.catch_warnings():
        # Damaged EXIF data and the like: of no use to a training, and printed once per worker.
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(encoded)) as image:
            orientation = _orientation(image)
            upright = image.size if orientation < _SIDEWAYS else image.size[::-1]
            box = choose_box(upright)
            factor = reduction(box, size)
            if factor > 1:
                drafted = image.draft(image.mode, (image.width // factor, image.height // factor))
                factor = factor if drafted else 1  # None: not a JPEG, which is decoded as it is
            if orientation > 1:
                ImageOps.exif_transpose(image, in_place=True)
            part = tuple(side / factor for side in box)
            return _plain(image).resize(size, resample, box=part).convert("RGB")


def decode(encoded: bytes) -> None:
    """Decode an image in full, as a test of the file. Raises BROKEN_IMAGE."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(encoded)) as image:
            _plain(image).convert("RGB")


def spread(found: int, wanted: int | None) -> slice | np.ndarray:
    """Return which of `found` samples to keep: all of them, or `wanted`, at even distances.

    The first ones would be those of the first few classes.

    Args:
        wanted: None, or more than there are: all.
    """
    if wanted is None or wanted == found:
        return slice(None)
    if wanted > found:
        logger.warning("total_images: %d, but there are only %d; an epoch has those", wanted, found)
        return slice(None)
    logger.warning("total_images: training on %d of %d images", wanted, found)
    return np.arange(wanted) * found // wanted


def mixup(images: Any, labels: Any, alpha: float, rng: Any = np.random) -> tuple[Any, ...]:
    """Mix a batch with itself in another order (Zhang et al. 2017, arXiv 1710.09412).

    Args:
        images: (B, ...) float, array or tensor.
        labels: (B,) class indices, array or tensor.
        alpha: > 0, of the Beta(alpha, alpha) distribution that the weight is drawn from.
        rng: draws; the elastic loop seeds `numpy.random` for each shard of each step.

    Returns:
        (images, labels_a, labels_b, lam): the loss is
        lam * loss(scores, labels_a) + (1 - lam) * loss(scores, labels_b).
    """
    if not alpha > 0:
        raise ValueError(f"mixup_alpha: must be above 0, got {alpha}")
    lam = float(rng.beta(alpha, alpha))
    order = rng.permutation(len(labels))
    return images * lam + images[order] * (1 - lam), labels, labels[order], lam


def _orientation(image: Image.Image) -> int:
    """Return 1 to 8, as in EXIF; 1, upright, where nothing sensible is said."""
    if "exif" not in image.info:  # nearly always, and looking closer costs more than decoding
        return 1
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except BROKEN_IMAGE:  # the picture itself may well be whole
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _plain(image: Image.Image) -> Image.Image:
    """Return the image in a mode whose values may be averaged, and which converts to RGB."""
    if image.mode in ("RGB", "L", "CMYK"):
        return image  # turned into RGB after the resize, when there is less of it
    if image.mode == "I" or image.mode.startswith("I;16"):  # 16 bits of grey, which PIL would clip
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")
