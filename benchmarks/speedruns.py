"""Time the one-file methods of speedruns/ beside the library with the same settings, taking turns in one process.

    OMP_NUM_THREADS=1 python benchmarks/speedruns.py    # writes benchmarks/results/speedruns-<device>.json

Both make the same rounds with the same evaluations. The library's time is that of a whole run, with its folder.
Reported is the library's time over the file's (above 1: the file is faster), the median over the repetitions and their
range.
"""

import argparse
import contextlib
import importlib.util
import io
import platform
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from report import seconds, write

import fl
from fl.models.architectures import ArchitectureOptions
from fl.settings.recipes import RECIPES

ROOT = Path(__file__).parents[1]
ROUNDS = 10


def speedrun(name: str) -> ModuleType:
    """Return the module of a file of speedruns/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "speedruns" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sides(device: str) -> dict[str, tuple[ModuleType, fl.Config]]:
    """Return each file with the library's settings that do the same, over few rounds."""
    one = {name: speedrun(name) for name in ("fedmr", "femam", "fedfa")}
    one["fedmr"].ROUNDS = one["fedfa"].ROUNDS = ROUNDS
    one["femam"].ROUNDS = (ROUNDS, ROUNDS, ROUNDS, ROUNDS)
    for module in one.values():
        module.DEVICE = device
    levels = RECIPES["femam"]()
    options = replace(levels.options["femam"], level_rounds=(ROUNDS,))
    sizes = ArchitectureOptions(choose="cycle", widths=(0.5, 1.0), depths=("2", "3"))
    settings = {
        "fedmr": fl.Config.of(rounds=ROUNDS),
        "femam": levels.replace(algorithms="femam", rounds=4 * ROUNDS, femam=options).runs()[0],
        "fedfa": fl.Config.of(
            algorithm="fedfa", model="preresnet20", norm="layer", width=(0.5,), lr=0.05, rounds=ROUNDS,
            architectures=sizes,
        ),
    }  # fmt: skip
    return {name: (one[name], config.replace(backend="vmap", device=device)) for name, config in settings.items()}


def quiet(call: Callable) -> Callable:
    """Return the same call without what it prints."""

    def silent() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            call()

    return silent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    print(f"{'method':8} {'file (s)':>8}  library / file (range)")
    for name, (module, config) in sides(device).items():
        with tempfile.TemporaryDirectory() as folder:
            runs = iter(range(10**6))
            file, library = quiet(module.main), quiet(lambda: fl.simulate(config, Path(folder) / str(next(runs))))  # noqa: B023
            file(), library()
            ratios, times = [], []
            for _ in range(args.repetitions):
                times.append(seconds(file, device))
                ratios.append(seconds(library, device) / times[-1])
        ratio = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        rows.append({"method": name, "seconds": statistics.median(times), "ratio": ratio})
        print(f"{name:8} {rows[-1]['seconds']:8.2f}  {ratio['median']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    about = {"torch": torch.__version__, "machine": platform.machine(), "rounds": ROUNDS}
    write(
        {**about, "repetitions": args.repetitions, "rows": rows}, ROOT / "benchmarks" / "results", f"speedruns-{device}"
    )


if __name__ == "__main__":
    main()
