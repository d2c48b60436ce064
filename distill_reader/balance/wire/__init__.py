"""The protocol between discovery servers, students and teachers."""
