"""What an attack does to FedFA and its rivals on handwritten digits: cells of our own, small enough for a CPU."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from fl.config import Config
from fl.config.recipes.fedfa import SMALL
from fl.federation.attack import AttackOptions
from fl.federation.defence import Defence
from fl.models.architectures import ArchitectureOptions
from fl.papers.cell import Arm, Cell, Comparison

BASE = replace(
    SMALL["digits"], partition="iid", masked_loss=False, rounds=15, eval_every=1, models_every=0, seeds=(0, 1),
    depth=(3,),
)  # fmt: skip
"""IID, 20 clients of which 5 take part, 15 rounds; those of `fedfa.ablation.digits.depths2-3of3`."""
LAMBDAS = (0, 1, 2, 5, 10, 20, 50)
"""The last but one is the paper's; 0 is no attack."""
SHARE = 0.2
_DEPTH = replace(BASE, architectures=replace(BASE.architectures, widths=(1.0,)))
_FULL = replace(BASE, architectures=ArchitectureOptions())
ARMS = {
    "fedfa": BASE, "nefl": BASE, "heterofl": BASE, "fedavg": _FULL, "fedfa-depth": _DEPTH, "flexifed": _DEPTH,
}  # fmt: skip
"""Each method in the settings where it can be run. In `fedavg` everybody has the full model, in the last two the widths
are alike."""
_STORED = "fedfa.ablation.digits.depths2-3of3"  # where the ablation keeps the runs that are also these
_END = Comparison("test accuracy in %, last five evaluations", "end5", "first", ())
_PAIR = ("fedfa", "nefl")
PATTERN = "fedfa.lambda.digits.LAMBDA"
"""Of the cells of the sweep."""
_SWEEP = (
    "how far a fifth of malicious clients lowers accuracy as lambda grows (digits, IID, 5 of 20 clients take part; "
    "with fedavg everybody has the full model, with fedfa-depth and flexifed only depths differ, else widths too)"
)
_ATTACK = AttackOptions(share=SHARE, amplify=20.0)


def cells() -> Iterator[Cell]:
    """The sweep over lambda, and lambda 20 in other settings."""
    for amplify in LAMBDAS:
        attack = AttackOptions(share=SHARE, amplify=float(amplify)) if amplify else AttackOptions()
        folder = f"fedfa.lambda.digits.{amplify}"
        arms = tuple(
            Arm(
                f"{_STORED if name in _PAIR and not amplify else folder}/{name}",
                replace(config, algorithm=(name.removesuffix("-depth"),), attack=attack),
            )
            for name, config in ARMS.items()
        )
        yield Cell(
            folder, "not in the paper", _SWEEP, arms, (replace(_END, arms=tuple(ARMS)),), pattern=PATTERN,
            settings=f"lambda {amplify}" if amplify else "no attack",
        )  # fmt: skip
    for name, (said, config) in variants().items():
        folder = f"fedfa.lambda20.digits.{name}"
        stored = "fedfa.lambda.digits.20" if name == "as-above" else folder
        yield Cell(
            folder, "not in the paper", "lambda 20 in other settings (digits, IID; widths and depths differ)",
            tuple(Arm(f"{stored}/{one}", replace(config, algorithm=(one,))) for one in _PAIR),
            (replace(_END, arms=_PAIR),
             Comparison("test accuracy in %, last five evaluations after rounds without attackers", "calm", "first",
                        _PAIR)),
            pattern="fedfa.lambda20.digits.SETTING", settings=said,
        )  # fmt: skip


def variants() -> dict[str, tuple[str, Config]]:
    """From name to what is different, in words, and the settings."""
    base = replace(BASE, attack=_ATTACK)
    return {
        "as-above": ("as with other lambdas", base),
        "largest": ("attackers with the largest model", replace(base, attack=replace(_ATTACK, architecture="largest"))),
        "one-attacker": ("one attacker", replace(base, attack=replace(_ATTACK, share=0.05))),
        "all-take-part": ("all 20 take part", replace(base, participants=20)),
        "clipped": ("updates cut to the median's length", replace(base, defence=Defence(clip=1.0))),
        "lr0.005": ("learning rate 0.005", replace(base, lr=0.005)),
        "long": ("60 rounds", replace(base, rounds=60)),
        "long-step": ("60 rounds, learning rate falls", replace(base, rounds=60, lr_schedule="step")),
    }


def breaks(accuracy: Mapping[str, Mapping[int, float]]) -> str:
    """The smallest lambda at which each method has less than half of its accuracy without an attack.

    Args:
        accuracy: from method to the accuracy at each lambda that was run; 0 is no attack.

    >>> breaks({"fedfa": {0: 90.0, 5: 50.0, 10: 40.0}, "nefl": {0: 90.0, 5: 20.0}, "fedavg": {0: 90.0, 1: 80.0}})
    'fedfa at 10, nefl at 5, fedavg at none that was run'
    """
    said = []
    for name, at in accuracy.items():
        if 0 in at:
            broken = [amplify for amplify in sorted(at) if at[amplify] < at[0] / 2]
            said.append(f"{name} at {broken[0] if broken else 'none that was run'}")
    return ", ".join(said)
