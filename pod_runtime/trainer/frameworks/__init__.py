"""The adapter protocol, and one folder per framework that implements it."""
