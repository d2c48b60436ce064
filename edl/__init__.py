"""The command `edl`, which only dispatches."""
