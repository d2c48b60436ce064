"""`DistillReader`, by the original's import."""

from distill_reader import DistillReader

__all__ = ["DistillReader"]
