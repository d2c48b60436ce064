"""Discovery with a Redis, by the original's names."""
