"""PaddlePaddle behind the loop's `Adapter`."""
