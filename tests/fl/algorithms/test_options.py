"""Every option of every method is read: another value of it, given as a setting, changes what the method computes."""

import dataclasses
from functools import cache

import pytest
import torch
from ranks import NEED_EXITS
from selection import some

import fl
from fl import Config
from fl.algorithms import OPTIONS, methods_of
from fl.base.rng import Rng
from fl.base.settings import Flag, marks
from fl.data import load
from fl.models.architectures import ArchitectureOptions

TINY = {"clients": 4, "participants": 3, "samples": 80, "min_samples": 5, "local_epochs": 1, "batch_size": 10}
TINY |= {"width": (0.1,), "lr": 0.1, "momentum": 0.5, "local_valid": 0.2, "rounds": 3}
WIDTHS, DEPTHS = ({"choose": "cycle", **given} for given in ({"widths": (0.5, 1.0)}, {"depths": ("3-1-1", "2-1-1")}))
SETTINGS = {
    "one model": TINY,
    "widths": TINY | {"architectures": ArchitectureOptions(**WIDTHS)},
    "depths": TINY | {"architectures": ArchitectureOptions(**DEPTHS), "model": "resnet20", "rounds": 1},
    "exits": TINY | {"architectures": ArchitectureOptions(**WIDTHS), "model": "resnet9", "exits": True},
    "many clients": TINY | {"clients": 6, "participants": 6},
}
OF_BLOCKS = {("fedfa", "graft"), ("flexifed", "strategy"), ("nefl", "step_sizes"), ("nefl", "keep")}
OF_BLOCKS |= {("inclusivefl", "own"), ("inclusivefl", "beta")}

BASE = {
    "fedgen": {"noise": 4, "hidden": 6, "steps": 2, "batch": 6},
    "femam": {"levels": ("global", "2", "personal"), "level_rounds": (1, 1)},
    "fesem": {"clusters": 2},
    "fesem_plus": {"clusters": 2, "epochs": 1},
    "fedavg_plus": {"epochs": 1},
    "fltrust": {"root": 8},
    "pfedme": {"inner_steps": 2},
}
"""Options that make a method tiny."""

BESIDE = {
    ("femam", "clustering"): {"levels": ("2",), "level_rounds": ()},  # which has to last some rounds
    ("femam", "prune"): {"min_gain": 1e6},
    ("fedmd", "samples"): {"samples": 2, "public": 0.5},
    ("femam", "window"): {"level_rounds": (), "variance": 1e9, "window": 2},
    ("femam", "variance"): {"level_rounds": (), "variance": 1e9, "window": 2},
    ("fedfa", "quantile"): {"scale": "norm"},
}
"""Options by which another one matters."""

OTHER = {
    **{(name, option): 0.25 for name in ("fedadam", "fedyogi") for option in ("beta1", "beta2")},
    ("fedavg_plus", "epochs"): 0,
    ("fedavgm", "beta"): 0.25,
    ("fedexp", "eps"): 100.0,
    ("fedexp", "max_step"): 1.0,
    ("fedfa", "quantile"): 0.5,
    ("fedfa", "scale"): "rms",
    ("fedgen", "decay"): 0.5,
    ("fedmd", "public"): 0.3,
    ("fedmr", "segment_fraction"): 1.0,
    ("fedmr", "unit"): "tensor",
    ("fedmut", "unit"): "tensor",
    ("femam", "clustering"): "kmeans",
    ("femam", "combine"): "mean",
    ("femam", "compare"): "classifier",
    ("femam", "min_gain"): 1e6,
    ("femam", "prox"): 1.0,
    ("femam", "level_rounds"): (2, 1),
    ("femam", "levels"): ("global", "3", "personal"),
    ("femam", "start"): "global",
    ("femam", "variance"): 0.0,
    ("fesem", "clustering"): "kmeans",
    ("fesem", "compare"): "classifier",
    ("fesem_plus", "clustering"): "kmeans",
    ("fesem_plus", "compare"): "classifier",
    ("flexifed", "strategy"): "basic",
    ("inclusivefl", "own"): "classifier",
    ("nefl", "keep"): ("101",),
}
"""Other values, where they are not simply a larger number, or the opposite."""

UNSEEN = {
    ("fedmr", "secure"): "the models are the same; tests/fl/secure is about who sees them",
    ("fedmr", "align"): "models of the same start are in one order already; tests of fedmr permute them",
}
"""Options that change no result, and why."""

CASES = [(name, field.name) for name, one in OPTIONS.items() if one for field in dataclasses.fields(one)]

DEFAULT = [case for case in CASES if case not in UNSEEN and case[0] in ("fedmr", "femam", "fedfa")]


def other(name, option):
    value = {option: getattr(OPTIONS[name], option), **BASE.get(name, {}), **BESIDE.get((name, option), {})}[option]
    if (name, option) in OTHER:
        return OTHER[name, option]
    if isinstance(value, str):  # another one of the names that there are
        (field,) = (field for field in dataclasses.fields(OPTIONS[name]) if field.name == option)
        return next(one for flag in marks(field, Flag) for one in flag.items if one != value)
    if isinstance(value, tuple):
        return tuple(item / 2 for item in value)
    return not value if isinstance(value, bool) else value + (1 if isinstance(value, int) else 0.5)


@cache
def data():
    return load("digits")


def kind(name, option):
    """The settings by which an option matters."""
    if name in NEED_EXITS:
        return "exits"
    if name in methods_of("heterogeneous"):
        return "depths" if (name, option) in OF_BLOCKS else "widths"
    return "many clients" if option == "compare" else "one model"


@cache
def results(name, options, kind):
    """All that the server keeps after some rounds, but how far it is, and what clients predict."""
    settings = SETTINGS[kind]
    fed, algorithm = fl.build(Config.of(algorithm=name, **{name: options}, **settings), data())
    server = algorithm.init()
    for number in range(1, settings["rounds"] + 1):
        rng = Rng(0, number)
        server, _ = algorithm.round(server, algorithm.choose(server, rng), rng)
    found = {(part, key): t for part in server.keys() - {"progress"} for key, t in server[part].items()}
    x = fed.data.test_x[:20]
    return found | {("predict", client): algorithm.predict(server, x, client) for client in (None, 0, 1, 2, 3)}


@pytest.mark.parametrize(("name", "option"), some([case for case in CASES if case not in UNSEEN], DEFAULT))
def test_options__another_value_makes_a_difference(name, option):
    one = dataclasses.replace(OPTIONS[name], **BASE.get(name, {}) | BESIDE.get((name, option), {}))
    two = dataclasses.replace(one, **{option: other(name, option)})
    assert getattr(one, option) != getattr(two, option)
    a, b = (results(name, options, kind(name, option)) for options in (one, two))
    assert a.keys() != b.keys() or any(a[key].shape != b[key].shape or not torch.equal(a[key], b[key]) for key in a)


def test_options__the_tables_are_of_options_that_there_are():
    assert set(CASES) >= OTHER.keys() | BESIDE.keys() | UNSEEN.keys()
    assert OPTIONS.keys() >= BASE.keys()
