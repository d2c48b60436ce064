"""The server itself: HTTP, the clock, the store and the nodes."""
