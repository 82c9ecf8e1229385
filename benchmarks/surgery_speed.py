"""Time and peak memory of surgery on stacks of K models, against two plain ways to write it.

    python benchmarks/surgery_speed.py            # prints the table, writes benchmarks/results/surgery-<device>.json
    python benchmarks/surgery_speed.py --quick    # a small CNN's shapes, to see that it runs

Three sides do the same work, alternating in one process, so that what else the machine does hits all alike:
`surgery`; `loop`, one small tensor operation a model and tensor, results allocated once; and `deepcopy`, what
the code of federated papers does: state dicts deep-copied first, then indexed. Reported are the ratios of their
times to ours (above 1: surgery is faster), the median over the repetitions and the range. `bandwidth` is the time of
`Tensor.copy_`, into memory already touched, of as many bytes as the operation must read and write at least, over our
time. A result in new memory also pays for its first touch (page faults): `clone` is the same for a copy that does.

Peak memory is what torch operations allocate beyond the inputs: a dispatch mode adds up the storages that
operations return and takes each off when it dies. It misses temporaries within one operation.

The submodels hold the leading half of every axis, except of colours and classes, as HeteroFL's do.
"""

import argparse
import copy
import gc
import json
import platform
import statistics
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import report
import torch
import torchvision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import surgery
import zoo
from surgery.plan import Plan, Source

MODELS = {
    "cnn": lambda: zoo.create("cnn"),
    "resnet50": lambda: torchvision.models.resnet50(),
    "vit_b_16": lambda: torchvision.models.vit_b_16(),
}
Q = 0.95


class Peak(TorchDispatchMode):
    """The most bytes of new storages that were alive at once."""

    def __init__(self, known: list[torch.Tensor]):
        super().__init__()
        self.alive = {t.untyped_storage()._cdata: 0 for t in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in (t for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._dead, storage._cdata)
        self.peak = max(self.peak, self.now)
        return out

    def _dead(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)


def stacked(model: nn.Module, k: int, device: str) -> surgery.Stack:
    """K models' random values."""
    return {
        n: torch.randn(k, *t.shape, device=device)
        if t.is_floating_point()
        else torch.zeros(k, *t.shape, dtype=t.dtype, device=device)
        for n, t in surgery.state(model).items()
    }


def corner(model: nn.Module) -> Plan:
    """Return the leading half of every axis but the first tensor's inputs and the last layer's outputs."""
    values = surgery.state(model)
    names = list(values)
    first, last = names[0], {names[-1], names[-2]}
    entries = {}
    for name, tensor in values.items():
        whole = {1} if name == first else {0} if name in last else set()
        index = tuple(
            None if axis in whole or size == 1 else ((0, size // 2),) for axis, size in enumerate(tensor.shape)
        )
        entries[name] = (Source(name, index),)
    return Plan(entries, {n: tuple(t.shape) for n, t in values.items()})


def corner_slices(plan: Plan) -> dict[str, tuple[slice, ...]]:
    return {n: tuple(slice(0, size) for size in shape) for n, shape in plan.small_shapes.items()}


def nbytes(values: dict[str, torch.Tensor]) -> int:
    return sum(t.nbytes for t in values.values())


# The plain sides: obvious per-model, per-tensor Python. `copied` deep-copies the models first.


def plain_shuffle(states, parts, rows, copied):
    states = copy.deepcopy(states) if copied else states
    result = [{} for _ in states]
    for names, row in zip(parts, rows.tolist()):
        for slot, source in enumerate(row):
            for name in names:
                result[slot][name] = states[source][name].clone()
    return result


def plain_extract(states, slices, copied):
    states = copy.deepcopy(states) if copied else states
    return [{name: state[name][where].clone() for name, where in slices.items()} for state in states]


def plain_embed(smalls, slices, full, copied):
    result = []
    for small in smalls:
        values = copy.deepcopy(full) if copied else {n: torch.zeros_like(t) for n, t in full.items()}
        mask = {n: torch.zeros_like(t, dtype=torch.bool) for n, t in full.items()}
        for name, where in slices.items():
            if copied:
                values[name].zero_()
            values[name][where] = small[name]
            mask[name][where] = True
        result.append((values, mask))
    return result


def plain_average(states, copied):
    states = copy.deepcopy(states) if copied else states
    result = {}
    for name, first in states[0].items():
        if not first.is_floating_point():
            result[name] = torch.stack([state[name] for state in states]).amax(0)
            continue
        result[name] = torch.zeros_like(first)
        for state in states:
            result[name] += state[name] / len(states)
    return result


def plain_average_by_plans(smalls, slices, fallback, copied):
    smalls, result = (copy.deepcopy(smalls), copy.deepcopy(fallback)) if copied else (smalls, {})
    for name, keep in fallback.items():
        total, number = torch.zeros_like(keep), torch.zeros_like(keep, dtype=torch.float32)
        for small, where in zip(smalls, slices):
            if keep.is_floating_point():
                total[where[name]] += small[name]
            else:
                total[where[name]] = torch.maximum(total[where[name]], small[name])
            number[where[name]] += 1
        mean = total / number if keep.is_floating_point() else total
        result[name] = torch.where(number > 0, mean, keep)
    return result


def plain_match_norms(states, copied):
    states = copy.deepcopy(states)  # both scale in place
    for name in states[0]:
        if not states[0][name].is_floating_point():
            continue
        norms = []
        for state in states:
            values = copy.deepcopy(state[name]) if copied else state[name]
            size = values.abs().flatten()
            threshold = size.kthvalue(int(Q * (size.numel() - 1)) + 1).values  # torch.quantile takes 2^24 at most
            norms.append(values[values.abs() <= threshold].norm())
        mean = sum(norms) / len(norms)
        for state, norm in zip(states, norms):
            state[name] *= mean / norm
    return states


def operations(model: nn.Module, k: int, device: str) -> dict[str, tuple[int, Callable, Callable, Callable]]:
    """Name: (bytes read and written at least, surgery, loop, deepcopy)."""
    models = stacked(model, k, device)
    states = surgery.unstack(models)
    parts = surgery.segments(surgery.layers(model))
    rows = surgery.permutations(len(parts), k, generator=torch.Generator().manual_seed(0), derange=True)
    plan = corner(model)
    whole = Plan(
        {n: (Source(n, (None,) * len(s)),) for n, s in plan.shapes.items()}, plan.shapes
    )  # every other client holds everything
    slices, full_slices = corner_slices(plan), corner_slices(whole)
    halves = plan.extract(models)
    half_states = surgery.unstack(halves)
    mixed = [half_states[c] if c % 2 else states[c] for c in range(k)]
    plans, wheres = [[b if c % 2 else a for c in range(k)] for a, b in ((whole, plan), (full_slices, slices))]
    one = states[0]
    total, half, single = nbytes(models), nbytes(halves), nbytes(one)
    small, halfway = half // k, sum(nbytes(s) for s in mixed)
    return (
        {
            "shuffle": (
                2 * total,
                lambda: surgery.shuffle(models, segments=parts, permutations=rows),
                lambda: plain_shuffle(states, parts, rows, False),
                lambda: plain_shuffle(states, parts, rows, True),
            ),
            "shuffle in place": (
                2 * total,
                lambda: surgery.shuffle(models, segments=parts, permutations=rows, inplace=True),
                lambda: plain_shuffle(states, parts, rows, False),
                lambda: plain_shuffle(states, parts, rows, True),
            ),
            "extract": (
                2 * half,
                lambda: plan.extract(models),
                lambda: plain_extract(states, slices, False),
                lambda: plain_extract(states, slices, True),
            ),
            "embed": (  # one model: the zeros, the mask's bytes and the values, read and written
                single + single // 4 + 2 * small,
                lambda: plan.embed(half_states[0]),
                lambda: plain_embed(half_states[:1], slices, one, False),
                lambda: plain_embed(half_states[:1], slices, one, True),
            ),
            "average": (
                total + single,
                lambda: surgery.average(models),
                lambda: plain_average(states, False),
                lambda: plain_average(states, True),
            ),
            "average by plans": (
                halfway + single,
                lambda: surgery.average(mixed, plans, fallback=one),
                lambda: plain_average_by_plans(mixed, wheres, one, False),
                lambda: plain_average_by_plans(mixed, wheres, one, True),
            ),
            "match_norms": (
                3 * total,
                lambda: surgery.match_norms(models, q=Q),
                lambda: plain_match_norms(states, False),
                lambda: plain_match_norms(states, True),
            ),
        },
        [*models.values(), *halves.values()],
    )


def measure(name: str, operation, known, repetitions: int, device: str) -> dict:
    """One row: alternate the sides, then count each one's memory."""
    moved, *calls = operation
    sides = dict(zip(("surgery", "loop", "deepcopy"), calls))
    block = torch.zeros(min(moved // 2, 1 << 28), dtype=torch.uint8, device=device)
    target = torch.zeros_like(block)
    sides["copy_"], sides["clone"] = partial(target.copy_, block), block.clone
    times = {side: [] for side in sides}
    warm = int(repetitions > 1)  # the first round warms up
    for number in range(repetitions + warm):
        for side in list(sides) if number % 2 else list(sides)[::-1]:
            elapsed = report.seconds(sides[side], device)
            if number >= warm:
                times[side].append(elapsed)
    row = {"operation": name, "repetitions": repetitions, "MB_moved": round(moved / 1e6, 1)}
    row |= {f"{side}_ms": round(1e3 * statistics.median(times[side]), 2) for side in ("surgery", "loop", "deepcopy")}
    for side in ("loop", "deepcopy"):
        ratios = [b / a for a, b in zip(times["surgery"], times[side])]
        row[f"{side}_ratio"] = [round(f(ratios), 2) for f in (statistics.median, min, max)]
    for side, label in (("copy_", "bandwidth"), ("clone", "clone")):
        ratios = [b * moved / (2 * block.nbytes) / a for a, b in zip(times["surgery"], times[side])]
        row[label] = round(statistics.median(ratios), 2)
    del block, target
    del sides["copy_"], sides["clone"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a dispatch mode does not see what other threads allocate
    for side in ("surgery", "loop", "deepcopy"):
        gc.collect()
        with Peak(known) as watch:
            sides[side]()
        row[f"{side}_peak_MB"] = round(watch.peak / 1e6, 1)
    torch.set_num_threads(threads)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=["resnet50", "vit_b_16"], choices=MODELS)
    parser.add_argument("--only", nargs="*", help="operations to measure; default all")
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.quick:
        args.models, args.repetitions, args.k = ["cnn"], 1, 2
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, torch {torch.__version__}; K = {args.k}; ms, times as slow as surgery (range), peaks in MB")
    print(
        f"{'model':10}{'operation':18}{'surgery':>9}{'loop/ours':>22}{'deepcopy/ours':>22}{'copy_':>7}{'clone':>7} peak"
    )
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"surgery-{args.device}{'-quick' if args.quick else ''}.json"
    result = {
        "device": args.device, "name": name, "threads": torch.get_num_threads(), "machine": platform.machine(),
        "torch": torch.__version__, "rows": [],
    }  # fmt: skip
    for model in args.models:
        with torch.device("meta"):
            net = MODELS[model]()
        table, known = operations(net, args.k, args.device)
        for operation, sides in table.items():
            if args.only and operation not in args.only:
                continue
            # The plain sides of match_norms take a minute on a CPU.
            repetitions = 1 if operation == "match_norms" else args.repetitions
            row = measure(operation, sides, known, repetitions, args.device)
            result["rows"].append({"model": model, "k": args.k, **row})
            path.write_text(json.dumps(result, indent=1) + "\n")  # row by row: a run that is cut short keeps them
            ratios = "".join(
                f"{median:10.2f} {f'({low}-{high})':>11}"
                for median, low, high in (row["loop_ratio"], row["deepcopy_ratio"])
            )
            print(
                f"{model:10}{operation:18}{row['surgery_ms']:9.1f}{ratios}{row['bandwidth']:7.2f}{row['clone']:7.2f}"
                f"   {row['surgery_peak_MB']} / {row['loop_peak_MB']} / {row['deepcopy_peak_MB']}",
                flush=True,
            )
        del table, known, sides
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
