"""Tools that explain failures. Nothing here runs while programs are correct."""
