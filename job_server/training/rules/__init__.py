"""The rules that advance a training job. Pure."""
