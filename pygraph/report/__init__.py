"""Reports: captured and uncaptured parts of each compiled graph, with reasons.

A user who reads ``coverage 83 %`` wants to know which of their lines is not captured. So a report keeps each decision
with its reason and the user's line, and all forms of a report show the same facts:

    backend ──fills in──► model.GraphReport ──► facts (sums, words) ─┬─► text.tables ─┬─► text (terminal)
                                                                    │                └─► html (page, picture)
                                                                    └─► facts.to_json (data)

A report is live: while the program runs, regions count their replays in it.
"""
