"""The teachers of one iteration, asked in parallel."""
