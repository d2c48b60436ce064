"""Nodes, slots and the schedule of changes. Pure."""
