"""What PyGraph adds to Inductor's compile time on BERT-base: copying, lifting, passes and write-back.

    python benchmarks/compile_time.py [--layers 12] [--train]

Caches are off, so that Inductor compiles. Prints one line per graph; both sides are measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import transformers

import pygraph


def main() -> None:
    """Compile once and print each graph's times in ms and PyGraph's share."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--train", action="store_true")
    chosen = parser.parse_args()
    config = transformers.BertConfig(num_hidden_layers=chosen.layers)
    model = transformers.BertForMaskedLM(config).train(chosen.train)
    tokens = torch.randint(0, config.vocab_size, (1, 128))
    compiled = torch.compile(model, backend="pygraph", options={"inductor": {"fx_graph_cache": False}})
    start = time.perf_counter()
    with torch.set_grad_enabled(chosen.train):
        loss = compiled(input_ids=tokens, labels=tokens).loss
    if chosen.train:
        loss.backward()
    whole = time.perf_counter() - start
    for report in pygraph.reports():
        ours = sum(ms for name, ms in report.times_ms.items() if name != "inductor")
        row = {
            "graph": report.name,
            "nodes": len(report.graph.nodes) if report.graph else 0,
            **{name: round(ms, 1) for name, ms in report.times_ms.items()},
            "share": round(ours / report.times_ms["inductor"], 4),
        }
        print(json.dumps(row))
    print(json.dumps({"torch": torch.__version__, "first_call_s": round(whole, 1)}))


if __name__ == "__main__":
    main()
