"""Soft labels on disk."""
