"""What users type, over the server's API."""
