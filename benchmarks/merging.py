"""Merge two large files: seconds and peak memory, side by side with mergekit, and whether the results agree.

    python benchmarks/merging.py --folder merging --gigabytes 2 [--mergekit PYTHON]

writes three checkpoints (a base and two models, bfloat16 or float32) into the folder, which it deletes at the end. Each
merge runs in a process of its own, whose peak memory is its largest resident set; files that a process maps
into memory count as far as they are resident, so the largest anonymous memory is told, too.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
METHODS = {"linear": {"weights": [1.0, 3.0]}, "slerp": {"t": 0.3}, "ties": {"density": 0.3}, "task_arithmetic": {}}
OURS = """
import sys, json
sys.path.insert(0, {root!r})
from surgery.__main__ import main
sys.exit(main(json.loads({argv!r})))
"""


def make(folder: Path, gigabytes: float, dtype: torch.dtype) -> None:
    """Return a base and two models in the shape of a language model, with an embedding and equal blocks."""
    from surgery.files import write
    from surgery.lazy import LazyState, Pieces

    width, words = 1024, 32000
    block = {"mlp.weight": (4 * width, width), "attention.weight": (4 * width, width), "norm.weight": (width,)}
    one = sum(a[0] * (a[1] if len(a) > 1 else 1) for a in block.values())
    blocks = max(1, round((gigabytes * 1e9 / dtype.itemsize - words * width) / one))
    shapes = {"model.embed_tokens.weight": (words, width)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(blocks) for name, shape in block.items()}

    def noise(seed: int, scale: float):
        def read(start: int, stop: int) -> torch.Tensor:
            draw = torch.Generator().manual_seed(seed + start)
            return torch.randn(stop - start, generator=draw) * scale

        return read

    for k, name in enumerate(("base", "a", "b")):
        entries = {}
        for i, (tensor, shape) in enumerate(shapes.items()):
            base, own = noise(i * 10**9, 1.0), noise((i + (k + 1) * 10**4) * 10**9, 0.1 * (k > 0))
            read = lambda start, stop, base=base, own=own: (base(start, stop) + own(start, stop)).to(dtype)  # noqa: E731
            entries[tensor] = Pieces(shape, dtype, read)
        (folder / name).mkdir(parents=True)
        write(folder / name / "model.safetensors", LazyState(entries))


def measured(command: list[str], environment: dict[str, str], folder: Path | None = None) -> dict:
    """Seconds, and the largest resident and anonymous memory in bytes of a process, looked at every 10 ms."""
    start = time.perf_counter()
    to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment, cwd=folder, **to)
    resident = anonymous = 0
    while process.poll() is None:
        try:
            lines = dict(line.split(":") for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
            resident = max(resident, int(lines["VmHWM"].split()[0]) * 1024)
            anonymous = max(anonymous, int(lines["RssAnon"].split()[0]) * 1024)
        except (OSError, KeyError, ValueError):
            pass
        time.sleep(0.01)
    text = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)[:200]} failed:\n{text[-3000:]}")
    return {"seconds": time.perf_counter() - start, "resident": resident, "anonymous": anonymous}


def ours(folder: Path, method: str, out: Path) -> dict:
    """Our merge."""
    argv = ["merge", method, str(folder / "a"), str(folder / "b"), "--out", str(out / "model.safetensors")]
    settings = dict(METHODS[method])
    if weights := settings.pop("weights", None):
        argv += ["--weights", ",".join(map(str, weights))]
    for name, value in settings.items():
        argv += ["--set", f"{name}={value}"]
    if method in ("ties", "task_arithmetic"):
        argv += ["--base", str(folder / "base")]
    out.mkdir()
    return measured([sys.executable, "-c", OURS.format(root=str(ROOT), argv=json.dumps(argv))], dict(os.environ))


def theirs(python: str, folder: Path, method: str, out: Path) -> dict:
    """mergekit's merge of the same files, without an architecture (`mergekit-pytorch`)."""
    a, b, base = (str(folder / name / "model.safetensors") for name in ("a", "b", "base"))
    settings = dict(METHODS[method])
    weights = settings.pop("weights", [1.0, 1.0])
    config = {"merge_method": method, "models": [{"model": a}, {"model": b}], "parameters": settings}
    for model, weight in zip(config["models"], weights):
        model["parameters"] = {"weight": weight}
    if method != "linear":
        config["base_model"] = a if method == "slerp" else base
    out.mkdir()
    (out / "config.yml").write_text(json.dumps(config))  # which YAML takes
    program = "from mergekit.scripts.merge_raw_pytorch import main; main()"
    return measured([python, "-c", program, str(out / "config.yml"), str(out)], dict(os.environ))


def apart(first: Mapping, second: Mapping) -> dict:
    """How two checkpoints differ: by how much at most, relative to the largest magnitude of the tensor; and the share
    of elements that differ by more than rounding, which is 1 % of the element.
    """
    most, differ, count = 0.0, 0, 0
    for name in first:
        gap, size = 0.0, 0.0
        for x, y in zip(first.pieces(name).slabs(), second.pieces(name).slabs()):
            x, y = x.float(), y.float()
            gap, size = max(gap, (x - y).abs().max().item()), max(size, x.abs().max().item())
            differ, count = differ + int(((x - y).abs() > 0.01 * x.abs()).sum()), count + x.numel()
        most = max(most, gap / size if size else gap)  # a scale of 0 makes tensors of zeros
    return {"largest": most, "share": differ / count}


def main() -> None:
    """Measure and print one JSON object for each merge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="a new folder, deleted at the end")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of each checkpoint")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--mergekit", metavar="PYTHON", help="a Python that has mergekit")
    parser.add_argument("--repeats", type=int, default=1)
    asked = parser.parse_args()
    dtype = getattr(torch, asked.dtype)
    sys.path.insert(0, str(ROOT))
    from surgery.files import open_state

    asked.folder.mkdir(parents=True)
    try:
        make(asked.folder, asked.gigabytes, dtype)
        size = (asked.folder / "a" / "model.safetensors").stat().st_size
        start = time.perf_counter()
        for name in "ab":
            shutil.copyfile(asked.folder / name / "model.safetensors", asked.folder / "copy")
        print(json.dumps({"copy of both files, seconds": time.perf_counter() - start, "bytes": 2 * size}), flush=True)
        (asked.folder / "copy").unlink()
        for method in asked.methods.split(","):
            for _ in range(asked.repeats):
                row = {"method": method, "ours": ours(asked.folder, method, asked.folder / "ours")}
                if asked.mergekit:
                    out = asked.folder / "theirs"
                    row["mergekit"] = theirs(asked.mergekit, asked.folder, method, out)
                    row["apart"] = apart(open_state(asked.folder / "ours"), open_state(out))
                    shutil.rmtree(out)
                shutil.rmtree(asked.folder / "ours")
                print(json.dumps(row), flush=True)
    finally:
        shutil.rmtree(asked.folder)


if __name__ == "__main__":
    main()
