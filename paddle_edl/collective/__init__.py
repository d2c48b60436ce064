"""Elastic training, by the original's names."""
