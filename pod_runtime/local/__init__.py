"""`edl run`: server, client and job on this machine."""
