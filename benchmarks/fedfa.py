"""Time of FedFA's global aggregation of mixed small models, against FedAvg's mean of as many full ones.

    python benchmarks/fedfa.py            # prints the table, writes benchmarks/results/fedfa-aggregation-<device>.json

Ten clients of a preresnet18, of widths 0.5, 0.75 and 1 in turn and of one or two blocks a section; their last blocks
stand for the blocks that they lack. Aggregation is `submodel_factors` (95th-percentile norms, one a layer) and
`average_submodels` with these factors. FedAvg is `average` of a stack of ten full models. All sides alternate in one
process, so that what else the machine does hits all alike. Reported are milliseconds and the ratio of each
repetition's times, as median and range. A result in new memory pays for its first touch, on all sides.
"""

import argparse
import itertools
import platform
import statistics
from pathlib import Path

import report
import torch

import surgery
import zoo
from fl.models.fleet import make_fleet

WIDTHS = (0.5, 0.75, 1.0)
DEPTHS = tuple(itertools.product((1, 2), repeat=4))  # blocks in each of the four sections


def cohort(k: int, device: str) -> tuple[torch.nn.Module, list[surgery.State], list[surgery.Submodel]]:
    """The full model, and k clients' states and plans, as `fl` makes them."""
    server = zoo.Spec("preresnet18", norm="static_batch")
    full, states = server.build().to(device), []
    specs = [server.scaled(WIDTHS[c % len(WIDTHS)], DEPTHS[7 * c % len(DEPTHS)]) for c in range(k)]
    plans = [client.plan for client in map(make_fleet(full, server, specs).__getitem__, range(k))]
    for c, plan in enumerate(plans):
        generator = torch.Generator(device).manual_seed(c)
        state = plan.extract(surgery.state(full))
        for tensor in filter(torch.is_floating_point, state.values()):
            tensor.mul_(torch.empty_like(tensor).uniform_(0.5, 1.5, generator=generator))
        states.append(state)
    return full, states, plans


def spread(values: list[float]) -> list[float]:
    return [round(f(values), 3) for f in (statistics.median, min, max)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--k", type=int, default=10, help="clients")
    parser.add_argument("--repetitions", type=int, default=31)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    full, states, plans = cohort(args.k, args.device)
    old, learnt = surgery.state(full), dict(full.named_parameters())
    groups = [[name for name in layer.tensors if name in learnt] for layer in surgery.layers(full)]
    sizes = list(range(100, 100 + args.k))
    models = surgery.stack([old] * args.k)
    factors = surgery.submodel_factors(states, plans, q=0.95, groups=groups, weights=sizes)

    def aggregate() -> surgery.State:
        return surgery.average_submodels(
            states,
            plans,
            fallback=old,
            weights=sizes,
            factors=surgery.submodel_factors(states, plans, q=0.95, groups=groups, weights=sizes),
        )

    sides = {
        "FedAvg, full models": lambda: surgery.average(models, weights=sizes),
        "FedFA": aggregate,
        "submodel_factors": lambda: surgery.submodel_factors(states, plans, q=0.95, groups=groups, weights=sizes),
        "average_submodels": lambda: surgery.average_submodels(
            states, plans, fallback=old, weights=sizes, factors=factors
        ),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(args.repetitions + 1):  # the first one warms up
        for side in list(sides) if number % 2 else list(sides)[::-1]:
            elapsed = report.seconds(sides[side], args.device)
            if number:
                times[side].append(1e3 * elapsed)
    first = times["FedAvg, full models"]
    rows = [
        {"side": side, "ms": spread(own), "ratio": spread([a / b for a, b in zip(own, first)])}
        for side, own in times.items()
    ]
    small = sum(t.numel() for state in states for t in state.values())
    print(f"{args.k} clients, {small:,} elements in their models, {full_size(old) * args.k:,} in as many full ones")
    print(f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}; median (range) of {args.repetitions}")
    print(f"{'side':22}{'ms':>26}{'times FedAvg':>26}")
    for row in rows:
        ms, ratio = (f"{m:.2f} ({low:.2f}-{high:.2f})" for m, low, high in (row["ms"], row["ratio"]))
        print(f"{row['side']:22}{ms:>26}{ratio:>26}")
    result = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu", "machine": platform.machine(),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "clients": args.k, "elements": small,
        "full_elements": full_size(old) * args.k, "repetitions": args.repetitions, "rows": rows,
    }  # fmt: skip
    report.write(result, args.out, f"fedfa-aggregation-{args.device}")


def full_size(state: surgery.State) -> int:
    return sum(tensor.numel() for tensor in state.values())


if __name__ == "__main__":
    main()
