"""Where services and teachers are known."""
