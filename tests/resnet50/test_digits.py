"""The digits that stand in for ImageNet."""

import numpy as np
import pytest
from digits import make_sets


@pytest.mark.full
def test_digits_are_images_as_others(make_options):
    train, test = make_sets(make_options(image_shape=(3, 48, 48), resize_short_size=48))
    assert (len(train), len(test)) == (1437, 360)
    image, label = train[0]
    assert (image.shape, image.dtype) == ((3, 48, 48), np.float32)
    assert label.dtype == np.int64
    np.testing.assert_array_equal(train[0][0], image)  # not augmented
    last, _test = make_sets(
        make_options(image_shape=(3, 48, 48), resize_short_size=48, data_format="NHWC")
    )
    np.testing.assert_array_equal(last[0][0], image.transpose(1, 2, 0))


def test_the_split_is_always_the_same_has_all_digits_in_both_parts_and_no_image_in_two(
    make_options,
):
    (train, test), (again, _test) = make_sets(make_options()), make_sets(make_options(seed=5))
    labels = [[int(part[index][1]) for index in range(len(part))] for part in (train, test)]
    assert np.bincount(labels[0]).min() >= 138
    assert np.bincount(labels[1]).min() >= 34
    assert labels[0] == [int(again[index][1]) for index in range(len(again))]
    # Two of the 1,797 images may look alike; a part of the training set cannot.
    seen = {train[index][0].tobytes() for index in range(len(train))}
    twice = sum(test[index][0].tobytes() in seen for index in range(len(test)))
    assert twice <= 3


def test_fewer_digits_are_trained_on_and_all_are_tested(make_options):
    train, test = make_sets(make_options(total_images=40))
    assert (len(train), len(test)) == (40, 360)


def test_too_few_classes_are_refused(make_options):
    with pytest.raises(ValueError, match=r"class_dim: 9 is too small for 10 digits"):
        make_sets(make_options(class_dim=9))
