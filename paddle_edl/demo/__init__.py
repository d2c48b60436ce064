"""The original's demonstration programs."""
