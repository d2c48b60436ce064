"""The protocols between students and teachers, as bytes."""
