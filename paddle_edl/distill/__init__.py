"""Distillation, by the original's names."""
