"""Decide which job gets which slots. Pure."""
