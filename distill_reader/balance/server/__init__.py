"""The discovery server."""
