"""Connections to teachers, one module for each protocol."""
