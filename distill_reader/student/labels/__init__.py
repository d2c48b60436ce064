"""Predictions made of the teachers' answers, and the losses."""
