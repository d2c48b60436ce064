"""Where samples come from, and the steps that use them."""
