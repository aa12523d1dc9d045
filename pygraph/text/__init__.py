"""Parts common to all text formats: quoting of words, tokens, and errors that point at tokens."""
