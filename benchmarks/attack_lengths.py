"""How far an attacker moves a model: lengths of updates beside that of the weights, in an attack's first rounds.

    python benchmarks/attack_lengths.py            # writes benchmarks/results/fedfa/attack-lengths.json

FedFA and NeFL on digits with lambda 20, as `python -m fl.reproduce fedfa.lambda.digits.20` trains them, seed 0.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

from fl import simulate
from fl.federation.attack import Attack
from fl.federation.cohort import stacks
from fl.papers.cells import find

OUT = Path(__file__).parent / "results/fedfa/attack-lengths.json"
_amplified = Attack.amplified


def measure(method: str, rounds: int) -> dict:
    """Means over the attackers of all rounds, each in lengths of the model that it started from."""
    config = replace(find("fedfa.lambda.digits.20").arm(method).config, seeds=(0,), rounds=rounds, device="cpu")
    seen: list[tuple[float, float]] = []

    def watched(self, honest, starts, spoilt, rows, names):
        before, after = ([one for s in stacks(states) for one in _rows(s, names)] for states in (starts, spoilt))
        own = [one for s in stacks(honest) for one in _rows(s, names)]
        for start, end, row in zip(before, after, rows):
            weights = _length(start, {})
            seen.append((_length(own[row], start) / weights, _length(end, start) / weights))
        return _amplified(self, honest, starts, spoilt, rows, names)

    with tempfile.TemporaryDirectory() as folder, patch.object(Attack, "amplified", watched):
        simulate(config, Path(folder) / "run", False, config.load(), on_round=lambda row: False)
    honest, spoilt = map(fmean, zip(*seen))
    amplified = config.attack.amplify * spoilt
    return {
        "rounds": rounds, "attackers": len(seen), "honest": honest, "spoilt": spoilt, "sent": amplified,
        "sent_by_participants": amplified / config.cohort(),
    }  # fmt: skip


def _rows(stack, names) -> list[dict]:
    """The parameters of each client of a stack."""
    kept = {name: tensor.double() for name, tensor in stack.items() if name in names}
    return [{name: tensor[k] for name, tensor in kept.items()} for k in range(len(next(iter(kept.values()))))]


def _length(one: dict, other: dict) -> float:
    return float(sum(((tensor - other.get(name, 0.0)) ** 2).sum() for name, tensor in one.items())) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    found = {method: measure(method, args.rounds) for method in ("fedfa", "nefl")}
    for method, numbers in found.items():
        print(f"{method:8}{'  '.join(f'{name} {value:.3g}' for name, value in numbers.items())}")
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
