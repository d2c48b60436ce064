"""The protocols that a teacher's port speaks."""
