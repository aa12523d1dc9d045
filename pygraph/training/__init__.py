"""Training steps as a whole."""
