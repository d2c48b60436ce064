"""The pods of this node: their folders, shims and processes."""
