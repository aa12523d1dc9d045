"""The benchmark suite and single measurements. They are not part of the wheel: run them from a checkout.

    python -m benchmarks bert-1 training --out results    workloads, side by side (``--list`` shows them)
    python benchmarks/new_sizes.py                        one script per question

``suite`` holds the workloads; ``running`` runs one in the process of a side; ``pygraph.bench`` times everything.
"""
