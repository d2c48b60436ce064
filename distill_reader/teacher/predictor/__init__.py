"""The process that computes a model."""
