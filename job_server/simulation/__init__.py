"""Simulate many elastic jobs on one cluster, in virtual time."""
