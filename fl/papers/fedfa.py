"""FedFA's tables and figures as cells. Its tables are images; its text has ranges over models and data sets."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from fl.algorithms.fedfa import FedFAOptions
from fl.config import Config
from fl.config.recipes.fedfa import RIVALS, SMALL, TARGETS, row
from fl.federation.attack import AttackOptions
from fl.papers import fedfa_attack
from fl.papers.cell import Arm, Cell, Comparison

_TITLES = {"preresnet": "Pre-ResNet", "mobilenetv2": "MobileNetV2", "efficientnetv2": "EfficientNetV2"}
_GLOBAL, _LOCAL = "test accuracy in %, last three evaluations", "local accuracy in %"
_ATTACK = AttackOptions(share=0.2, amplify=20.0)


def cells() -> Iterator[Cell]:
    """All of them."""
    for data, network, spread, mode in product(TARGETS, _TITLES, ("iid", "noniid"), RIVALS):
        config = row(data, network, mode, spread)
        yield from _compared(data, network, spread, mode, config)
    for mode in RIVALS:
        yield _text(mode)
    yield from ablation()
    yield from fedfa_attack.cells()
    yield from _images()


def _compared(data: str, network: str, spread: str, mode: str, config: Config) -> Iterator[Cell]:
    """A comparison with a mode's rival: without an attack, attacked, and what it computes up to a target."""
    title, *ratios = RIVALS[mode]
    rival = title.lower()
    better, worse = ([_band(text) for text in ratios[at : at + 3]] for at in (0, 3))  # IID, own classes, all classes
    base, pattern = f"{data}.{network}.{spread}.{mode}", "DATA.NETWORK.SPREAD.MODE"
    folder = f"fedfa.table1.{base}"
    clean = tuple(Arm(f"{folder}/{name}", replace(config, algorithm=(name,))) for name in ("fedfa", rival))
    pair = ("fedfa", rival)
    compared = [
        Comparison(f"{_GLOBAL}, FedFA by {title}", "end", "ratio", pair, band=better[0 if spread == "iid" else 2])
    ]
    if spread == "noniid":
        compared.append(Comparison(f"{_LOCAL}, FedFA by {title}", "local", "ratio", pair, band=better[1]))
    yield Cell(
        folder, "Table 1", f"FedFA's accuracy by {title}'s", clean, tuple(compared),
        pattern=f"fedfa.table1.{pattern}", settings="a reconstruction",
    )  # fmt: skip

    names = (rival, "fedfa", f"{rival}-attacked", "fedfa-attacked")
    attacked = tuple(
        Arm(f"fedfa.figure3.{base}/{name}-attacked", replace(config, algorithm=(name,), attack=_ATTACK))
        for name in pair
    )
    drops = [
        Comparison(
            f"drop of the {_GLOBAL}, {title}'s by FedFA's",
            "end",
            "drop",
            names,
            band=worse[0 if spread == "iid" else 2],
        )
    ]
    if spread == "noniid":
        drops.append(Comparison(f"drop of the {_LOCAL}, {title}'s by FedFA's", "local", "drop", names, band=worse[1]))
    yield Cell(
        f"fedfa.figure3.{base}", "Table 1, Fig. 3", f"an attack (lambda 20, a fifth of the clients) costs {title} more",
        (*clean, *attacked), tuple(drops), pattern=f"fedfa.figure3.{pattern}", settings="a reconstruction",
    )  # fmt: skip

    target = TARGETS[data][spread == "noniid"]
    yield Cell(
        f"fedfa.table2.{base}", "Table 2", f"up to {target:.0%} FedFA computes as much as {title} (Table 1's runs)",
        clean, (Comparison(f"TMAC up to {target:.0%}, FedFA by {title}", f"tmac{target}", "ratio", pair,
                           band=(0.95, 1.02), larger=False),),
        pattern=f"fedfa.table2.{pattern}", settings="a reconstruction",
    )  # fmt: skip


def _band(text: str) -> tuple[float, float]:
    """
    >>> _band("0.98-1.02")
    (0.98, 1.02)
    """
    low, high = map(float, text.split("-"))
    return low, high


def _text(mode: str) -> Cell:
    title = RIVALS[mode][0]
    rival, folder = title.lower(), f"fedfa.table3.{mode}"
    config = row("wikitext2", "transformer", mode, "iid")
    return Cell(
        folder, "Table 3", f"{title}'s local perplexity by FedFA's",
        tuple(Arm(f"{folder}/{name}", replace(config, algorithm=(name,))) for name in (rival, "fedfa")),
        (Comparison(f"local perplexity, {title}'s by FedFA's", "local_perplexity", "ratio", (rival, "fedfa"),
                    band=(1.07, 4.50)),),
        pattern="fedfa.table3.MODE", settings="a reconstruction",
    )  # fmt: skip


_IID = {"partition": "iid", "masked_loss": False}
_BASES = {
    "digits": replace(SMALL["digits"], **_IID, rounds=15, eval_every=1),
    "digits-noniid": replace(SMALL["digits"], eval_every=2),
    "fashion-mnist": replace(SMALL["fashion-mnist"], **_IID, unequal=True, eval_every=2),
    "fashion-mnist-noniid": replace(SMALL["fashion-mnist"], eval_every=2),
}
"""Settings of this project, small enough for a CPU."""


def ablation() -> Iterator[Cell]:
    """FedFA's parts beside NeFL: grafting on and off, each scale, the depths of the clients and of the full model."""
    for (data, base), (full, depths) in product(_BASES.items(), ((2, ("1", "2")), (3, ("2", "3")), (3, ("1", "3")))):
        config = replace(
            base, models_every=0, seeds=(0, 1), depth=(full,), architectures=replace(base.architectures, depths=depths)
        )
        folder = f"fedfa.ablation.{data}.depths{'-'.join(depths)}of{full}"
        arms = {"fedfa": replace(config, algorithm=("fedfa",)), "nefl": replace(config, algorithm=("nefl",))}
        for scale, graft in product(("norm", "rms", "none"), (True, False)):
            if (scale, graft) != ("norm", True):
                options = FedFAOptions(graft=graft, scale=scale)
                name = f"fedfa-{scale}{'' if graft else '-nograft'}"
                arms[name] = replace(config, algorithm=("fedfa",), fedfa=options)
        said = f"{data.removesuffix('-noniid')}, {'non-IID' if 'noniid' in data else 'IID'}"
        yield Cell(
            folder, "not in the paper", "which of FedFA's parts matter, and at which depths",
            tuple(Arm(f"{folder}/{name}", one) for name, one in arms.items()),
            (Comparison("test accuracy in %, last five evaluations", "end5", "first", tuple(arms)),),
            pattern="fedfa.ablation.DATA.DEPTHS", settings=f"{said}, depths {' and '.join(depths)} of {full}",
        )  # fmt: skip


def _images() -> Iterator[Cell]:
    """Tables and figures of which the text has no number that a run could be compared with."""
    for number, what in (("4", "the networks"), ("5", "the clients' candidates"), ("6", "the training settings")):
        yield Cell(
            f"fedfa.table{number}", f"Table {number}", f"{what} (image)",
            command="python -m fl.run fedfa-cifar10-preresnet-both-iid --help",
        )  # fmt: skip
    for number, network in zip("789", _TITLES.values()):
        yield Cell(
            f"fedfa.table{number}", f"Table {number}", f"blocks of a section are alike: {network} (image)",
            command="python -m fl.analysis similarity RUN",
        )  # fmt: skip
    yield Cell(
        "fedfa.table10", "Table 10", "weights of models of different size differ in scale (image)",
        command="python -m fl.analysis scales RUN RUN",
    )  # fmt: skip
    for number, network in zip("789", _TITLES.values()):
        yield Cell(
            f"fedfa.figure{number}", f"Fig. {number}", f"the weights' distributions: {network} (image)",
            command="python -m fl.analysis scales RUN RUN",
        )  # fmt: skip
