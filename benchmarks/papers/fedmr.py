"""FedMR's Table 1 and figures as cells."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.papers.cell import OWN, SMALLER, Arm, Cell, Comparison, Published, arms
from benchmarks.papers.recipes.fedmr import METHODS, NUMBERS, fashion_mnist_rivals, released, row
from fl.algorithms.fedmr import FedMROptions
from fl.algorithms.fedmut import FedMutOptions
from fl.settings import Experiment

_LATE = "test accuracy in %, mean of the last ten evaluations"
_RISE = Comparison(
    "rise of the cosine from its lowest tenth to the last, by the released code's measure (`models_cosine_released`)",
    "released_cosine_rise", "above", ("fedmr",), band=(0.01, 2.0),
)  # fmt: skip
_PLAIN_RISE = replace(_RISE, what="rise of the plain cosine from its lowest tenth to the last", measure="cosine_rise")
_OTHER = "the stored runs have only the plain cosine, another measure"
_LOSS = Comparison(
    "test loss, mean of the last ten evaluations", "late_loss", "first", ("fedmr", "fedavg"), larger=False
)
_CURVES = {"resnet20": "ResNet-20", "vgg16": "VGG-16"}
_SPREADS = {"dir0.1": "Dirichlet 0.1", "dir0.5": "Dirichlet 0.5", "dir1.0": "Dirichlet 1.0", "iid": "IID"}
_ORDER = ("fedmr", *(name for name in METHODS if name != "fedmr"))


def cells() -> Iterator[Cell]:
    """Yield all cells of FedMR."""
    for (data, model, spread), numbers in NUMBERS.items():
        yield from _row(data, model, spread, numbers)
    yield from _figures()
    yield from _smaller()
    yield from _gaps()
    yield from _longer()


def _row(data: str, model: str, spread: str, numbers: dict[str, str]) -> Iterator[Cell]:
    """Yield a row of Table 1 in the settings that it may have: the text's, momentum 0.5, and the released code's."""
    text, code = row(data, model, spread), released(data, model, spread)
    base, end = f"fedmr.table1.{data}", "" if data == "femnist" else f".{spread}"
    lenet = code.config.model.name == "lenet"
    short, network = _short(spread, data, model), "LeNet, " if lenet else ""
    settings = {
        "": (text, ""),
        "-momentum0.5": (short, f"{network}momentum 0.5"),
        "-released": (code, f"{network}momentum 0.5, units of tensors" + ", coarse labels" * (data == "cifar100")),
    }
    if (data, model, spread) == ("cifar10", "cnn", "dir0.1"):  # the split that the text cites, not the released code's
        settings["-hsu"] = (_hsu(), f"{network}momentum 0.5, split of Hsu et al.")
    if data == "cifar100":  # coarse labels in the paper's units of layers
        settings["-coarse"] = (short.replace(dataset=code.config.data.dataset), f"{network}momentum 0.5, coarse labels")
    for kind, (experiment, differences) in settings.items():
        name = f"{'lenet' if lenet and kind else model}{kind}".replace("lenet-momentum0.5", "lenet")
        yield Cell(
            f"{base}.{name}{end}", "Table 1", "FedMR has the highest test accuracy",
            arms(f"{base}.{name}{end}", experiment.replace(eval_every=10), _ORDER),
            (Comparison(_LATE, "late", "numbers", _ORDER, tuple(Published.read(numbers[m]) for m in _ORDER)),),
            pattern=f"fedmr.table1.DATA.MODEL{kind}.SPREAD" + " (CNN: lenet)" * (kind == "-momentum0.5"),
            settings=differences, row=f"{base}.{model}{end}",
        )  # fmt: skip


def _short(spread: str, data: str = "cifar10", model: str = "cnn") -> Experiment:
    """Return a row of Table 1 with momentum 0.5 and the released code's model, which is LeNet for the CNN."""
    settings = row(data, model, spread)
    # IID clients have equally many samples, so both averages are the same; the stored runs say weighted.
    mutants = FedMutOptions(weighted=spread == "iid")
    return settings.replace(
        momentum=0.5, model=released(data, model, spread).config.model.name, eval_every=10, fedmut=mutants
    )


def _hsu() -> Experiment:
    """Return the row at Dirichlet 0.1 with the split that the text cites, and Fig. 6's measure."""
    return _short("dir0.1").replace(partition="dirichlet_mixture", alpha=0.1, eval_client_models_every=10)


def _figures() -> Iterator[Cell]:
    both = ("fedmr", "fedavg")
    yield Cell(
        "fedmr.figure5", "Fig. 5", "Indep, which shuffles whole models, stays far behind FedAvg",
        arms("fedmr.figure5", _plain("resnet20", "dir0.5"), ("fedavg", "indep")),
        (Comparison(_LATE, "late", "first", ("fedavg", "indep")),),
    )  # fmt: skip
    for spread in _SPREADS:
        experiment = _plain("resnet20", spread).replace(eval_client_models_every=10)  # for the released code's cosine
        plain = arms(f"fedmr.figure8.{spread}", experiment, both)
        yield Cell(
            f"fedmr.figure6.{spread}", "Fig. 6", "the models' cosine falls first and rises later", plain[:1],
            (_RISE,),
            pattern="fedmr.figure6.SPREAD",
        )  # fmt: skip
        yield Cell(
            f"fedmr.figure8.{spread}", "Fig. 8", "FedMR's test loss is lower than FedAvg's", plain,
            (_LOSS,),
            pattern="fedmr.figure8.SPREAD",
        )  # fmt: skip
        folder = f"fedmr.table1.cifar100.resnet20.{spread}"
        table = row("cifar100", "resnet20", spread).replace(eval_every=10)
        yield Cell(
            f"fedmr.figure9.{spread}", "Fig. 9", "FedMR's curve is the highest and the smoothest (the runs of Table 1)",
            arms(folder, table, _ORDER),
            (Comparison(_LATE, "late", "first", _ORDER),
             Comparison("step between evaluations in points, last half", "roughness", "first", _ORDER, larger=False)),
            pattern="fedmr.figure9.SPREAD",
        )  # fmt: skip
    for number in (5, 10, 20, 50, 100):
        experiment = row("cifar10", "resnet20", "dir0.1").replace(eval_every=10, participation=0.0, participants=number)
        yield Cell(
            f"fedmr.figure10.k{number}", "Fig. 10", f"FedMR is the best, with {number} clients a round",
            arms(f"fedmr.figure10.k{number}", experiment, _ORDER), (Comparison(_LATE, "late", "first", _ORDER),),
            pattern="fedmr.figure10.kK",
        )  # fmt: skip
    for model, title in _CURVES.items():
        experiment = _plain(model, "dir1.0").replace(algorithms=("fedmr",))
        shares = {"layers": 0.0, **{f"p{share}": share for share in (0.1, 0.2, 0.5, 1.0)}}
        folder = f"fedmr.figure11.{model}"
        yield Cell(
            folder, "Fig. 11", f"{title}: the finer the segments, the better; single layers are best",
            tuple(
                Arm(f"{folder}/{name}", experiment.replace(fedmr=FedMROptions(segment_fraction=share)))
                for name, share in shares.items()
            ),
            (Comparison(_LATE, "late", "first", tuple(shares)),), settings="the fractions are ours",
            pattern="fedmr.figure11.MODEL",
        )  # fmt: skip
        folder, lengths = f"fedmr.figure12.{model}", (100, 0, 20, 50)
        yield Cell(
            folder, "Fig. 12", f"{title}: first stages of 50 and 100 rounds are best",
            tuple(Arm(f"{folder}/n{n}", experiment.replace(fedmr=FedMROptions(stage1_rounds=n))) for n in lengths),
            (Comparison(_LATE, "late", "first", ("n100", "n0", "n20")),), settings="the lengths between are ours",
            pattern="fedmr.figure12.MODEL",
        )  # fmt: skip
    yield Cell(
        "fedmr.figure7", "Fig. 7", "FedMR's model lies in a flatter place than FedAvg's",
        command="python -m fl.landscape runs/pair",
    )  # fmt: skip


def _plain(model: str, spread: str) -> Experiment:
    """Return a setting of CIFAR-10 without a first stage."""
    return row("cifar10", model, spread).replace(eval_every=10, fedmr=FedMROptions(stage1_rounds=0))


def _smaller() -> Iterator[Cell]:
    """Yield cells of Fashion-MNIST, LeNet, 100 rounds (docs/results/fedmr.md), and of LeNet's runs of Table 1."""
    base, order = fashion_mnist_rivals(), (*(name for name in _ORDER if name != "fedmut"), "indep")
    kinds = {
        "dir0.5": (base, "dirichlet0.5"),
        "dir0.1": (base.replace(alpha=0.1), "dirichlet0.1"),
        "dir0.1-momentum0.5": (base.replace(alpha=0.1, momentum=0.5), "momentum0.5"),
    }
    for name, (experiment, folder) in kinds.items():
        run, tables = f"fedmr.smaller.{name}", f"fashion-mnist-rivals/{folder}/{{}}-seed*.csv"
        lines = arms(run, experiment, order, tables)
        mutants = (*arms(run, experiment, ("fedmut",)), _weighted(run, experiment, tables.format("fedmut")))
        yield Cell(
            f"fedmr.smaller.accuracy.{name}", SMALLER, "FedMR has the highest test accuracy on Fashion-MNIST",
            (*lines, *mutants),
            (Comparison(_LATE, "late", "first", (*order, *(arm.name for arm in mutants))),),
            "fedmr.smaller.accuracy.SETTING", "LeNet, 100 rounds",
        )  # fmt: skip
        yield Cell(
            f"fedmr.smaller.cosine.{name}", SMALLER, "the models' cosine falls first and rises later on Fashion-MNIST",
            lines[:1], (_RISE,), "fedmr.smaller.cosine.SETTING", f"LeNet, 100 rounds; {_OTHER}",
        )  # fmt: skip
        yield _plain_cosine(name, f"Fashion-MNIST, {name}", lines[:1])
    both, long = ("fedmr", "fedavg"), "LeNet, momentum 0.5, no first stage, 500 rounds"
    table = [(name, words, _short(name), f".{name}", f"; {_OTHER}") for name, words in _SPREADS.items()]
    hsu = ("hsu", "Dirichlet 0.1 as in Hsu et al.", _hsu(), "-hsu.dir0.1", "")
    for spread, kind, experiment, end, other in (*table, hsu):
        setting = f"{kind}, {long}"
        lines = arms(f"fedmr.table1.cifar10.lenet{end}", experiment, both)
        yield Cell(
            f"fedmr.smaller.cosine.cifar10-{spread}", SMALLER, "the models' cosine falls first and rises later on "
            "CIFAR-10 (the runs of Table 1)", lines[:1], (_RISE,), "fedmr.smaller.cosine.SETTING", f"{setting}{other}",
        )  # fmt: skip
        yield _plain_cosine(f"cifar10-{spread}", f"CIFAR-10, {kind}, momentum 0.5", lines[:1])
        yield Cell(
            f"fedmr.smaller.loss.cifar10-{spread}", SMALLER, "FedMR's test loss is lower than FedAvg's on CIFAR-10 "
            "(the runs of Table 1)", lines, (_LOSS,), "fedmr.smaller.loss.SETTING", setting,
        )  # fmt: skip
    for number in (5, 20):
        experiment = _short("dir0.1").replace(participation=0.0, participants=number, seeds=(0,))
        yield Cell(
            f"fedmr.smaller.clients.k{number}", SMALLER, f"FedMR is ahead of FedAvg with {number} clients a round",
            arms(f"fedmr.smaller.clients.k{number}", experiment, both), (Comparison(_LATE, "late", "first", both),),
            "fedmr.smaller.clients.kK", "CIFAR-10, Dirichlet 0.1, LeNet, momentum 0.5, 500 rounds",
        )  # fmt: skip
    folder = "fedmr.table1.cifar10.lenet.dir1.0"
    yield Cell(
        "fedmr.smaller.indep.cifar10", SMALLER, "Indep, which shuffles whole models, stays far behind FedAvg on "
        "CIFAR-10", arms(folder, _short("dir1.0"), ("fedavg", "indep")),
        (Comparison(_LATE, "late", "first", ("fedavg", "indep")),),
        settings="Dirichlet 1.0, LeNet, momentum 0.5, 500 rounds",
    )  # fmt: skip
    flat = "fedmr.smaller.flat."
    small = {
        "digits": (f"{flat}digits", Experiment.of(seeds=(0, 1, 2)), "Dirichlet 0.5, 40 rounds"),
        "fashion-mnist": (f"{flat}fashion-mnist", base.replace(rounds=20), "Dirichlet 0.5, LeNet, 20 rounds"),
        "cifar10": (f"{flat}cifar10", _short("dir0.1").replace(seeds=(0,)), f"{table[0][1]}, {long}"),
        "cifar10-hsu": (f"fedmr.table1.cifar10.lenet{hsu[3]}", _hsu(), f"{hsu[1]}, {long}"),
    }
    for name, (run, experiment, setting) in small.items():
        yield Cell(
            f"{flat}{name}", SMALLER, f"FedMR's model lies in a flatter place than FedAvg's on {name}",
            arms(run, experiment, both),
            (Comparison("mean rise of the test loss within one filter norm, in a random plane through the model "
                        "(`python -m fl.landscape`)", "rise", "first", both, larger=False),
             Comparison("trace of the test loss's Hessian", "trace", "first", both, larger=False),
             Comparison("test loss in its middle", "last_loss", "first", both, larger=False)),
            f"{flat}DATA", setting, row=f"{flat}{name.removesuffix('-hsu')}",
        )  # fmt: skip


def _plain_cosine(name: str, settings: str, lines: tuple[Arm, ...]) -> Cell:
    """Return the cell on the cosine over all parameters, which is not Fig. 6's measure."""
    return Cell(
        f"fedmr.plain-cosine.{name}", OWN, "whether the plain cosine of FedMR's models, over all parameters, rises "
        "again (LeNet). Fig. 6 shows another measure, the released code's: a mean over chunks of five entries of the "
        "state, with the step counters of batch norms", lines, (_PLAIN_RISE,), "fedmr.plain-cosine.SETTING", settings,
    )  # fmt: skip


def _gaps() -> Iterator[Cell]:
    """Yield cells on FedMut's average where clients differ in size, beside the runs of Table 1."""
    for spread in ("dir0.1", "dir0.5", "dir1.0"):
        experiment, names = _short(spread), ("fedmr", "fedavg", "fedmut")
        lines = arms(f"fedmr.table1.cifar10.lenet.{spread}", experiment, names)
        yield Cell(
            f"fedmr.gap.{spread}", OWN, "what FedMut's average does to it (CIFAR-10, LeNet, momentum 0.5): with fedmut "
            "clients count alike, as in the released code, so that mutations cancel, with fedmut-weighted by their "
            "samples", (*lines, _weighted(f"fedmr.gap.{spread}", experiment)),
            (Comparison(_LATE, "late", "first", (*names, "fedmut-weighted")),), "fedmr.gap.SPREAD",
            spread.replace("dir", "Dirichlet "),
        )  # fmt: skip


def _longer() -> Iterator[Cell]:
    """Yield a cell with twice the released code's rounds and the split of Hsu et al."""
    folder, both = "fedmr.longer.cifar10-hsu", ("fedmr", "fedavg")
    yield Cell(
        folder, OWN, "whether FedMR comes nearer to the paper with more rounds (CIFAR-10, LeNet, momentum 0.5)",
        arms(folder, _hsu().replace(rounds=1000, seeds=(2,)), both), (Comparison(_LATE, "late", "first", both),),
        "fedmr.longer.SPREAD", "Dirichlet 0.1 as in Hsu et al.",
    )  # fmt: skip


def _weighted(folder: str, experiment: Experiment, tables: str = "") -> Arm:
    """Return an arm of FedMut that weights clients by their samples."""
    options = replace(experiment.options["fedmut"], weighted=True)
    return Arm(f"{folder}/fedmut-weighted", experiment.replace(algorithms=("fedmut",), fedmut=options), tables)
