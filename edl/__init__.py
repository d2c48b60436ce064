"""The command `edl`: a dispatcher, nothing else."""
