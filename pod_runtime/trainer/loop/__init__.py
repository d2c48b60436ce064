"""The elastic loop."""
