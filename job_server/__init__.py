"""The job server: it decides which pods of a job run. Importing this package loads nothing."""
