"""The state machine of a training job. Pure."""
