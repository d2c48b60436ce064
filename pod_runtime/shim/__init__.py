"""The process that holds one pod. Standard library only."""
