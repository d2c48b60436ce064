"""The state of a training, in memory and on disk."""
