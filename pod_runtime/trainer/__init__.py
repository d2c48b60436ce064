"""The parts of a trainer: the elastic loop and what it needs."""
