"""The server's contract: types, JSON, errors and a client. Other packages import nothing else."""
