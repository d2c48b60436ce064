"""What runs in a teacher server: its front, which speaks the protocols, and its predictors."""
