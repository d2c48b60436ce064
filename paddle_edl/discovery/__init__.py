"""Registration of teachers, by the original's names."""
