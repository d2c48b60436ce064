"""The job server and the job client, by the original's names."""
