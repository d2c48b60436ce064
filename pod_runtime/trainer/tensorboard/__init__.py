"""One TensorBoard run of a training."""
