"""Narrow a Llama of 7 billion parameters on the meta device, which has shapes and no numbers.

    python benchmarks/meta.py    # writes benchmarks/results/meta-cpu.json

The memory is the most that the process had, with torch and transformers.
"""

import os
import resource
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import torch
from report import write
from transformers import LlamaConfig, LlamaForCausalLM

import surgery

OUT = Path(__file__).parent / "results"
TURNS = 3


def main() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig())  # whose defaults are those of Llama 7B
    parameters = sum(p.numel() for p in model.parameters())
    seconds = []
    for _ in range(TURNS):
        began = time.process_time()
        small, _ = surgery.narrow(model, 0.5, {"input_ids": torch.ones(1, 8, dtype=torch.long, device="meta")})
        seconds.append(time.process_time() - began)
    left = sum(p.numel() for p in small.parameters())
    row = {
        "parameters": parameters,
        "left": left,
        "seconds": [round(one, 2) for one in seconds],
        "median": round(statistics.median(seconds), 2),
        "peak_gigabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    write(row, OUT, "meta-cpu")
    print(row)


if __name__ == "__main__":
    main()
