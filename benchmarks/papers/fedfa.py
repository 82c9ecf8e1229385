"""FedFA's tables and figures as cells, and our own cells on parts of it and on attacks.

The paper's tables are images; its text has ranges over models and data sets.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from benchmarks.papers.cell import OWN, SMALLER, Arm, Cell, Comparison, arms
from benchmarks.papers.recipes.fedfa import RIVALS, SMALL, TARGETS, row
from fl import ArchitectureOptions, AttackOptions, Defence
from fl.algorithms.fedfa import FedFAOptions
from fl.settings import Experiment

_TITLES = {"preresnet": "Pre-ResNet", "mobilenetv2": "MobileNetV2", "efficientnetv2": "EfficientNetV2"}
_GLOBAL, _LOCAL = "test accuracy in %, last three evaluations", "local accuracy in %"
SHARE = 0.2
_ATTACK = AttackOptions(share=SHARE, amplify=20.0)
_IID = {"partition": "iid", "masked_loss": False}
_PLACE = "DATA.NETWORK.SPREAD.MODE"
_RECONSTRUCTION = "a reconstruction"


def cells() -> Iterator[Cell]:
    """Yield all cells of FedFA."""
    for data, network, spread, mode in product(TARGETS, _TITLES, ("iid", "noniid"), RIVALS):
        yield from _compare(data, network, spread, mode)
    yield from _smaller()
    yield from _smaller_attacked()
    yield from _long()
    yield from _fashion_mnist()
    yield from _cifar10()
    for mode in RIVALS:
        yield _text(mode)
    yield from _ablation()
    yield from _attacked()
    yield from _images()


def _compare(data: str, network: str, spread: str, mode: str) -> Iterator[Cell]:
    """Yield comparisons with a mode's rival: without an attack, attacked, and of the operations up to a target."""
    title, *ratios = RIVALS[mode]
    base, experiment = f"{data}.{network}.{spread}.{mode}", row(data, network, mode, spread)
    folder, pair = f"fedfa.table1.{base}", ("fedfa", title.lower())
    clean = arms(folder, experiment, pair)
    yield Cell(
        folder, "Table 1", f"FedFA's accuracy by {title}'s", clean,
        (*_ratios("ratio", f"{{}}, FedFA by {title}", pair, ratios[:3], spread),),
        pattern=f"fedfa.table1.{_PLACE}", settings=_RECONSTRUCTION,
    )  # fmt: skip

    yield _drops(
        f"fedfa.figure3.{base}", "Table 1, Fig. 3", clean, experiment.replace(attack=_ATTACK), mode, spread,
        f"fedfa.figure3.{_PLACE}", _RECONSTRUCTION,
    )  # fmt: skip

    target = TARGETS[data][spread == "noniid"]
    yield Cell(
        f"fedfa.table2.{base}", "Table 2", f"up to {target:.0%} FedFA computes as much as {title} (Table 1's runs)",
        clean, (Comparison(f"TMAC up to {target:.0%}, FedFA by {title}", f"tmac{target}", "ratio", pair,
                           band=(0.95, 1.02), larger=False),),
        pattern=f"fedfa.table2.{_PLACE}", settings=_RECONSTRUCTION,
    )  # fmt: skip


def _drops(
    folder: str,
    place: str,
    clean: tuple[Arm, ...],
    attacked: Experiment,
    mode: str,
    spread: str,
    pattern: str,
    setting: str,
) -> Cell:
    """Return the cell that divides the accuracy that an attack costs a mode's rival by what it costs FedFA."""
    title, *bands = RIVALS[mode]
    pair = ("fedfa", title.lower())
    under_attack = [Arm(f"{arm.run}-attacked", arm.experiment) for arm in arms(folder, attacked, pair)]
    names = tuple(arm.name for arm in (*reversed(clean), *reversed(under_attack)))
    amplify = attacked.config.extensions["attack"].amplify
    classes = 100 if attacked.config.data.dataset == "cifar100" else 10
    ratios = _ratios("drop", f"drop of the {{}}, {title}'s by FedFA's", names, bands[3:], spread)
    chances = (100 / classes, 500 / classes)  # among all classes, and among the fifth that a client holds
    return Cell(
        folder, place, f"an attack (lambda {amplify:g}, a fifth of the clients) costs {title} more",
        (*clean, *under_attack),
        tuple(replace(ratio, chance=chance) for ratio, chance in zip(ratios, chances)),
        pattern=pattern, settings=setting,
    )  # fmt: skip


def _ratios(
    kind: str, what: str, names: tuple[str, ...], bands: list[str], spread: str, measure: str = "end"
) -> Iterator[Comparison]:
    """Yield comparisons of global accuracy and, where clients hold few classes, of local accuracy.

    Args:
        bands: the paper's: IID, on the clients' own classes, and on all classes.

    >>> [r.band for r in _ratios("ratio", "{}", ("fedfa", "nefl"), ["1.00-1.02", "0.99-1.06", "0.95-1.06"], "iid")]
    [(1.0, 1.02)]
    """
    iid, local, everything = (tuple(map(float, band.split("-"))) for band in bands)
    accuracy = _GLOBAL if measure == "end" else "test accuracy in %, last round"
    yield Comparison(what.format(accuracy), measure, kind, names, band=iid if spread == "iid" else everything)
    if spread == "noniid":
        yield Comparison(what.format(_LOCAL), "local", kind, names, band=local)


def _smaller() -> Iterator[Cell]:
    """Yield cells of small models with one or two blocks per section, without an attack (docs/results/fedfa.md)."""
    mobile = SMALL["fashion-mnist"].replace(model="mobilenetv2", stem="cifar", rounds=16, channels_last=True)
    kinds = {
        "fashion-mnist.preresnet": (SMALL["fashion-mnist"], "fashion-mnist preresnet18"),
        "cifar10.preresnet": (SMALL["cifar10"], "cifar10 preresnet18"),
        "fashion-mnist.mobilenetv2": (mobile, "fashion-mnist mobilenetv2"),
    }
    for (name, (experiment, data)), spread, mode in product(kinds.items(), ("iid", "noniid"), RIVALS):
        title, *ratios = RIVALS[mode]
        experiment = _differing(experiment.replace(depth=(2,)), mode, ("1", "2"))
        experiment = experiment.replace(**_IID, unequal=True) if spread == "iid" else experiment
        folder, pair = f"fedfa.smaller.{name}.{spread}.{mode}", ("fedfa", title.lower())
        where = {
            "data": data, "differ": mode, "partition": "iid" if spread == "iid" else "shards", "share": "0.0",
            "defence": "mean",
        }  # fmt: skip
        yield Cell(
            folder, SMALLER, f"FedFA's accuracy by {title}'s",
            tuple(replace(arm, where={**where, "method": arm.name, "scale": "norm" if arm.name == "fedfa" else ""})
                  for arm in arms(folder, experiment, pair, "fedfa/runs.csv")),
            (*_ratios("ratio", f"{{}}, FedFA by {title}", pair, ratios[:3], spread, "last"),),
            pattern=f"fedfa.smaller.{_PLACE}", settings="small models, 16 or 24 rounds",
        )  # fmt: skip


def _differing(experiment: Experiment, mode: str, depths: tuple[str, ...]) -> Experiment:
    """Return settings whose architectures differ in depth, in width, or in both."""
    choice = replace(experiment.config.model.architectures, depths=() if mode == "width" else depths)
    return experiment.replace(architectures=replace(choice, widths=(1.0,)) if mode == "depth" else choice)


_DIGITS = SMALL["digits"].replace(
    depth=(3,), rounds=15, local_epochs=2, batch_size=20, eval_every=3, eval_client_models_every=15,
    seeds=(0, 1, 2),
)  # fmt: skip
_NARROW = "digits, narrow Pre-ResNet-20"


def _both(
    data: str,
    experiment: Experiment,
    mode: str,
    spread: str,
    setting: str,
    stored: str = "",
    amplify: tuple[int, ...] = (20,),
) -> Iterator[Cell]:
    """Yield a mode's comparisons in our settings: without an attack, whose runs lie in `stored`, and with attacks."""
    title, *ratios = RIVALS[mode]
    place, pair = f"{data}.{spread}.{mode}", ("fedfa", title.lower())
    clean = arms(stored or f"fedfa.smaller.{place}", experiment, pair)
    yield Cell(
        f"fedfa.smaller.{place}", SMALLER, f"FedFA's accuracy by {title}'s", clean,
        (*_ratios("ratio", f"{{}}, FedFA by {title}", pair, ratios[:3], spread),),
        pattern=f"fedfa.smaller.{_PLACE}", settings=setting,
    )  # fmt: skip
    for strength in amplify:
        attacked = experiment.replace(attack=replace(_ATTACK, amplify=float(strength)))
        yield _drops(
            f"fedfa.smaller-attacked.lambda{strength}.{place}", SMALLER, clean, attacked, mode, spread,
            "fedfa.smaller-attacked.LAMBDA.DATA.SPREAD.MODE", setting,
        )  # fmt: skip


def _long() -> Iterator[Cell]:
    """Yield cells of digits with the rounds of Table 1's reconstruction, without and with attacks of two strengths."""
    for spread, mode in product(("iid", "noniid"), RIVALS):
        rounds = row("cifar10", "preresnet", mode, spread).config.rounds
        experiment = _DIGITS.replace(
            rounds=rounds, eval_every=rounds // 20, eval_client_models_every=rounds, seeds=(0,)
        )
        experiment = _differing(experiment.replace(**_IID) if spread == "iid" else experiment, mode, ("2", "3"))
        setting = f"{_NARROW}, {rounds} rounds"
        yield from _both("digits-long", experiment, mode, spread, setting, amplify=(20, 5))


def _fashion_mnist() -> Iterator[Cell]:
    """Yield cells of Fashion-MNIST with four times the rounds of `_smaller`, without and with a weaker attack."""
    for spread in ("iid", "noniid"):
        experiment = SMALL["fashion-mnist"].replace(
            depth=(2,), rounds=100, eval_every=10, eval_client_models_every=100, seeds=(0, 1)
        )
        experiment = experiment.replace(**_IID, unequal=True) if spread == "iid" else experiment
        experiment = _differing(experiment, "both", ("1", "2"))
        yield from _both(
            "fashion-mnist-long", experiment, "both", spread, "narrow Pre-ResNet-18, 100 rounds", amplify=(5,)
        )


def _smaller_attacked() -> Iterator[Cell]:
    """Yield digits without an attack, with the paper's, and with a weaker one, which leaves more than chance."""
    for spread, mode in product(("iid", "noniid"), RIVALS):
        experiment = _differing(_DIGITS.replace(**_IID) if spread == "iid" else _DIGITS, mode, ("2", "3"))
        stored = f"fedfa.smaller-attacked.clean.digits.{spread}.{mode}"
        yield from _both("digits", experiment, mode, spread, f"{_NARROW}, 15 rounds", stored, (20, 5))


def _cifar10() -> Iterator[Cell]:
    """Yield cells of CIFAR-10 with two or three blocks per section: with and without attack, and the smallest model."""
    for spread, mode in product(("iid", "noniid"), RIVALS):
        experiment = SMALL["cifar10"].replace(eval_every=2, seeds=(0,))
        experiment = _differing(
            experiment.replace(**_IID, unequal=True) if spread == "iid" else experiment, mode, ("2", "3")
        )
        setting = "narrow Pre-ResNet-18, 24 rounds"
        yield from (both := list(_both("cifar10-deep", experiment, mode, spread, setting)))
        if mode == "both":
            smallest = experiment.replace(
                algorithms=("fedavg",), depth=(2,), width=(experiment.config.model.width[0] / 2,),
                architectures=ArchitectureOptions(),
            )  # fmt: skip
            yield Cell(
                f"fedfa.smallest.cifar10-deep.{spread}", OWN,
                "whether FedFA's model of all architectures is better than FedAvg's of everybody's smallest "
                f"(CIFAR-10, {setting}; widths and depths differ)",
                (*both[0].arms, Arm(f"fedfa.smallest.cifar10-deep.{spread}/fedavg", smallest)),
                (Comparison(_GLOBAL, "end", "first", ("fedfa", "fedavg")),
                 Comparison(_LOCAL, "local", "first", ("fedfa", "fedavg"))),
                pattern="fedfa.smallest.DATA.SPREAD", settings="IID" if spread == "iid" else "non-IID",
            )  # fmt: skip


def _text(mode: str) -> Cell:
    title = RIVALS[mode][0]
    rival, folder = title.lower(), f"fedfa.table3.{mode}"
    experiment = row("wikitext2", "transformer", mode, "iid")
    return Cell(
        folder, "Table 3", f"{title}'s local perplexity by FedFA's",
        arms(folder, experiment, (rival, "fedfa")),
        (Comparison(f"local perplexity, {title}'s by FedFA's", "local_perplexity", "ratio", (rival, "fedfa"),
                    band=(1.07, 4.50)),),
        pattern="fedfa.table3.MODE", settings="a reconstruction",
    )  # fmt: skip


_BASES = {
    "digits": SMALL["digits"].replace(**_IID, rounds=15, eval_every=1),
    "digits-noniid": SMALL["digits"].replace(eval_every=2),
    "fashion-mnist": SMALL["fashion-mnist"].replace(**_IID, unequal=True, eval_every=2),
    "fashion-mnist-noniid": SMALL["fashion-mnist"].replace(eval_every=2),
}
"""Our settings, small enough for a CPU."""


def _ablation() -> Iterator[Cell]:
    """Yield cells of FedFA's parts beside NeFL: grafting on and off, each scale, depths of clients and full model."""
    for (data, base), (full, depths) in product(_BASES.items(), ((2, ("1", "2")), (3, ("2", "3")), (3, ("1", "3")))):
        experiment = base.replace(
            eval_client_models_every=0,
            seeds=(0, 1),
            depth=(full,),
            architectures=replace(base.config.model.architectures, depths=depths),
        )
        folder = f"fedfa.ablation.{data}.depths{'-'.join(depths)}of{full}"
        lines = {"fedfa": experiment.replace(algorithms=("fedfa",)), "nefl": experiment.replace(algorithms=("nefl",))}
        for scale, graft in product(("norm", "rms", "none"), (True, False)):
            if (scale, graft) != ("norm", True):
                options = FedFAOptions(graft=graft, scale=scale)
                name = f"fedfa-{scale}{'' if graft else '-nograft'}"
                lines[name] = experiment.replace(algorithms=("fedfa",), fedfa=options)
        setting = f"{data.removesuffix('-noniid')}, {'non-IID' if 'noniid' in data else 'IID'}"
        yield Cell(
            folder, OWN, "which of FedFA's parts matter, and at which depths",
            tuple(Arm(f"{folder}/{name}", arm) for name, arm in lines.items()),
            (Comparison("test accuracy in %, last five evaluations", "end5", "first", tuple(lines)),),
            pattern="fedfa.ablation.DATA.DEPTHS", settings=f"{setting}, depths {' and '.join(depths)} of {full}",
        )  # fmt: skip


BASE = SMALL["digits"].replace(
    **_IID, rounds=15, eval_every=1, eval_client_models_every=0, seeds=(0, 1),
    depth=(3,),
)  # fmt: skip
"""IID, 5 of 20 clients per round, 15 rounds, as in `fedfa.ablation.digits.depths2-3of3`."""
LAMBDAS = (0, 1, 2, 5, 10, 20, 50)
"""20 is the paper's; 0 is no attack."""
_DEPTH = BASE.replace(architectures=replace(BASE.config.model.architectures, widths=(1.0,)))
_FULL = BASE.replace(architectures=ArchitectureOptions())
ARMS = {
    "fedfa": BASE, "nefl": BASE, "heterofl": BASE, "fedavg": _FULL, "fedfa-depth": _DEPTH, "flexifed": _DEPTH,
}  # fmt: skip
"""Each method in settings that it supports: in `fedavg` all clients have the full model, in the last two only depths
differ."""
_STORED = "fedfa.ablation.digits.depths2-3of3"  # where the ablation stores the runs that both share
_END = Comparison("test accuracy in %, last five evaluations", "end5", "first", ())
_PAIR = ("fedfa", "nefl")
_VALUES = (
    "how far a fifth of malicious clients lowers accuracy as lambda grows (digits, IID, 5 of 20 clients take part; "
    "with fedavg everybody has the full model, with fedfa-depth and flexifed only depths differ, else widths too)"
)


def _attacked() -> Iterator[Cell]:
    """Yield cells of all values of lambda, and of lambda 20 in other settings."""
    for amplify in LAMBDAS:
        attack = AttackOptions(share=SHARE, amplify=float(amplify)) if amplify else AttackOptions()
        folder = f"fedfa.lambda.digits.{amplify}"
        lines = tuple(
            Arm(
                f"{_STORED if name in _PAIR and not amplify else folder}/{name}",
                experiment.replace(algorithms=(name.removesuffix("-depth"),), attack=attack),
            )
            for name, experiment in ARMS.items()
        )
        yield Cell(
            folder, OWN, _VALUES, lines, (replace(_END, arms=tuple(ARMS)),), pattern="fedfa.lambda.digits.LAMBDA",
            settings=f"lambda {amplify}" if amplify else "no attack",
        )  # fmt: skip
    for name, (difference, experiment) in _variants().items():
        folder = f"fedfa.lambda20.digits.{name}"
        stored = "fedfa.lambda.digits.20" if name == "as-above" else folder
        yield Cell(
            folder, OWN, "lambda 20 in other settings (digits, IID; widths and depths differ)",
            arms(stored, experiment, _PAIR),
            (replace(_END, arms=_PAIR),
             Comparison("test accuracy in %, last five evaluations after rounds without attackers", "calm", "first",
                        _PAIR)),
            pattern="fedfa.lambda20.digits.SETTING", settings=difference,
        )  # fmt: skip


def _variants() -> dict[str, tuple[str, Experiment]]:
    """Return for each name a description of the difference, and the settings."""
    base = BASE.replace(attack=_ATTACK)
    return {
        "as-above": ("as with other lambdas", base),
        "largest": ("attackers with the largest model", base.replace(attack=replace(_ATTACK, architecture="largest"))),
        "one-attacker": ("one attacker", base.replace(attack=replace(_ATTACK, share=0.05))),
        "all-take-part": ("all 20 take part", base.replace(participants=20)),
        "clipped": ("updates cut to the median's length", base.replace(defence=Defence(clip=1.0))),
        "lr0.005": ("learning rate 0.005", base.replace(lr=0.005)),
        "long": ("60 rounds", base.replace(rounds=60)),
        "long-step": ("60 rounds, learning rate falls", base.replace(rounds=60, lr_schedule="step")),
    }


def _images() -> Iterator[Cell]:
    """Yield tables and figures for which the text has no number to compare a run with."""
    for name, place, what, command in (
        (
            "table4-6",
            "Tables 4 to 6",
            "networks, candidates and settings",
            "benchmarks.papers fedfa-cifar10-preresnet-both-iid --help",
        ),
        ("table7-9", "Tables 7 to 9", "blocks of a section are alike", "benchmarks.papers.models similarity RUN"),
        (
            "table10",
            "Table 10",
            "weights of models of different size differ in scale",
            "benchmarks.papers.models scales RUN RUN",
        ),
        ("figure7-9", "Figs. 7 to 9", "the weights' distributions", "benchmarks.papers.models scales RUN RUN"),
    ):
        yield Cell(f"fedfa.{name}", place, f"{what} (image)", command=f"python -m {command}")
