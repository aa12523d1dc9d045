"""Launch programs, the second stage of the IR: recordings of captures, and the steps of their replay. No torch here."""
