"""The job client: it supervises the pods of one node."""
