"""The state machine of a job of teachers, and how many it needs. Pure."""
