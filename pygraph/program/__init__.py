"""Launch programs, the second stage of the IR: what a capture recorded, and how it is replayed. No torch here."""
