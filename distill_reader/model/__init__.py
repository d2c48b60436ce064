"""What a model takes and returns."""
