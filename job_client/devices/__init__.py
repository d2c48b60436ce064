"""The devices of this node."""
