"""Handwritten digits in place of ImageNet, for a look without a download.

1,797 real grey images of 8x8 pixels that come inside scikit-learn, resized to `image_shape`.
"""

from typing import Any

import numpy as np
from PIL import Image
from transforms import Recipe, spread

TEST_IMAGES = 360  # a fifth
CLASSES = 10


class Digits:
    """One of the two parts. Each item: image float32 (3, H, W) or (H, W, 3), label int64.

    Not augmented: a mirrored digit is another sign, and a crop of one often is as well.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, recipe: Recipe) -> None:
        """`images`: (N, 8, 8) with values from 0 to 16; `labels`: (N,)."""
        self._images = np.minimum(images * 16, 255).astype(np.uint8)
        self._labels = labels.astype(np.int64)
        self._recipe = recipe

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        grey = Image.fromarray(self._images[index])
        image = grey.resize(self._recipe.size, self._recipe.resample).convert("RGB")
        return self._recipe.to_array(image), self._labels[index]


def make_sets(options: Any) -> tuple[Digits, Digits]:
    """Return the training and the test part: the same split, with all digits in each, always.

    Raises:
        ValueError: `class_dim` is too small for ten digits, or another option is wrong.
    """
    # Here, so that those who train on images of their own need no scikit-learn.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    if options.class_dim < CLASSES:
        raise ValueError(f"class_dim: {options.class_dim} is too small for {CLASSES} digits")
    recipe = Recipe.of(options)
    digits = load_digits()
    train_images, test_images, train_labels, test_labels = train_test_split(
        digits.images,
        digits.target,
        test_size=TEST_IMAGES,
        stratify=digits.target,
        random_state=0,
    )
    chosen = spread(len(train_labels), options.total_images)
    return (
        Digits(train_images[chosen], train_labels[chosen], recipe),
        Digits(test_images, test_labels, recipe),
    )
