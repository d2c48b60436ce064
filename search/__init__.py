"""A search for the best parameters of a training: each trial is an elastic job of a job server."""
