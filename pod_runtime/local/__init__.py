"""`edl run`: a job server, a job client and a job on this machine."""
