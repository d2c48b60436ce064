"""Decide what a TrainingJob needs, from what the API server lists. Pure."""
