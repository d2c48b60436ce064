"""Which samples go into which request, and answers in order."""
