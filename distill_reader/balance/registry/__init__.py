"""The registry of services, their teachers and students."""
