"""The state machine of a job of teachers, and its autoscaler. Pure."""
