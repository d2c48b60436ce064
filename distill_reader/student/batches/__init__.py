"""What goes in which request, and back in order."""
