"""Reports: what was captured of each compiled graph, what was not, and why.

A user who reads ``coverage 83 %`` wants to know which line of theirs is the rest. So a report keeps everything that was
decided together with its reason and the user's line, and every form of it shows the same:

    backend ──fills in──► model.GraphReport ──► facts (sums, words) ─┬─► text.tables ─┬─► text (terminal)
                                                                    │                └─► html (page, picture)
                                                                    └─► facts.to_json (data)

A report is live: regions count their replays in it while the program runs.
"""
