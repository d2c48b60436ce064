"""Inside a trainer: the elastic loop and what it is made of."""
