"""Flat tensors: what is copied into them, and back."""

import numpy as np
import paddle
import pytest

from pod_runtime.trainer.frameworks.paddle.flat import DeviceFlat, HostFlat, lay_out


@pytest.mark.parametrize("make", [HostFlat, DeviceFlat])
def test_a_swap_takes_the_tensors_in_and_puts_the_other_values_there(make):
    start = [
        paddle.to_tensor([1.0, 2.0]),
        paddle.to_tensor([3], "int64"),  # of another type than the flat one
        paddle.zeros([0]),
        paddle.to_tensor([[4.0, 5.0], [6.0, 7.0]]).t(),  # not contiguous
    ]
    slices, size = lay_out(start, "float32")
    before, now = make(size, "float32"), make(size, "float32")
    before.gather(start, slices)
    for tensor in start:
        tensor.set_value(tensor * 10)
    now.swap(start, slices, before)
    assert now.numbers(0, size) == [10, 20, 30, 40, 60, 50, 70]
    assert before.numbers(0, size) == [1, 2, 3, 4, 6, 5, 7]
    values = [each.numpy().tolist() for each in start]
    assert values == [[1, 2], [3], [], np.array([[4, 6], [5, 7]]).tolist()]
