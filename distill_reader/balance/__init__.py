"""Discovery of teachers, and their assignment to students."""
