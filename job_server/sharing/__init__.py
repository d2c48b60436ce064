"""Which job gets which slots. Pure."""
