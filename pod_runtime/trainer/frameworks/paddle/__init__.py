"""PaddlePaddle behind the loop's `Framework`."""
