"""Specs of a model's inputs and outputs, and their encodings."""
