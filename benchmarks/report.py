"""How the programs of this folder take times, and where they leave what they have measured."""

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch


def write(result: dict, folder: Path, name: str, done: bool = True) -> None:
    """Write folder/name.json, and say so.

    Args:
        done: False for what is known so far: should the program be ended, that much is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result if done else {**result, "unfinished": True}, indent=1) + "\n")
    if done:
        print(f"wrote {path}")


def seconds(call: Callable, device: str) -> float:
    """Return the time of a call, until the device has done it."""
    gc.collect()
    begin = time.perf_counter()
    result = call()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - begin
    del result
    return elapsed
