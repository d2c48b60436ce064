"""The teachers of one iteration, asked side by side."""
