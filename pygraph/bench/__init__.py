"""``pygraph bench``: one program compiled in several ways (*sides*), timed side by side, results compared first.

Two compilers in one process disturb each other: memory pools, captured graphs and streams of one slow the other down.
Two processes one after the other also measure drift of clocks and load by others. So each side has its own process;
all processes are alive at the same time, and only one runs:

    coordinator ──┬── eager    ▇ · · ▇ · ·        ▇ a block of calls, drained at both ends
    (measure)     ├── default  · ▇ · · · ▇        · waits on a pipe
                  └── pygraph  · · ▇ · ▇ ·
                               round 1 round 2    the order is drawn anew in each round

A ratio is the median of the ratios within rounds, so that drift changes both times. A side whose results differ from
those of eager is not timed.
"""
