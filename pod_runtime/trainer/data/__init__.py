"""Reads samples, and defines the steps that use them."""
