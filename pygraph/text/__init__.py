"""What every text has in common: which words are quoted, and how; tokens, and errors that point at them."""
