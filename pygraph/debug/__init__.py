"""Tools that explain what went wrong. Nothing here runs while programs are right."""
