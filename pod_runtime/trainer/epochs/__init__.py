"""The original's calls and `Model.fit`: checkpoints by whole epochs."""
