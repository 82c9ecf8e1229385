"""A file with a METHOD is all that it takes to add one, and nothing else knows methods by name."""

import ast
import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from fleets import SPECS, fleet_federation
from ranks import NEED_ADAPTERS
from rounds import made
from torch import nn

from fl import ArchitectureOptions, Config, FLError, algorithms
from fl.algorithms import ALGORITHMS, OPTIONS, fedavg, methods_of
from fl.algorithms.method import Method
from fl.base.rng import Rng
from fl.engine.losses import by_name
from fl.federation.attack import Attack
from fl.federation.compression import Compression
from fl.federation.defence import Defence
from fl.federation.pace import Pace, PaceOptions
from fl.federation.presence import Presence
from fl.federation.privacy import Privacy
from fl.federation.requirements import REQUIREMENTS
from fl.models.adapted import AdapterOptions, adapted

ROOT = Path(__file__).parents[3]


def test_what_methods_are_made_of_can_be_imported():
    for name in ALGORITHMS:
        assert getattr(algorithms, name) is ALGORITHMS[name]
    for options in OPTIONS.values():
        assert getattr(algorithms, type(options).__name__) is type(options)


ASKING = {
    "masked": {"masked": True},
    "loss": {"loss": by_name("focal", "classification")},
    "exits": {"model": "resnet20", "exits": True},
    "adapters": {"model": adapted(nn.Linear(64, 3), AdapterOptions("lora"), torch.Generator())},
    "tampering": {"defence": Defence(rule="median")},
    "choosing": {"defence": Defence(rule="krum", malicious=0)},
    "pace": {"pace": Pace(torch.ones(4, dtype=torch.float64))},
    "compression": {"compression": Compression("topk")},
    "feedback": {"compression": Compression("topk", feedback=True)},
    "privacy": {"privacy": Privacy(clip=1.0)},
    "presence": {"presence": Presence(torch.ones(4), torch.full((4,), 9))},
}
BESIDE = {"choosing": {"tampering"}, "feedback": {"compression"}}
REFUSALS = [(name, what) for name, method in ALGORITHMS.items() for what in method.refuses]


@pytest.mark.parametrize(("name", "what"), REFUSALS)
def test_methods_refuse_from_python_what_they_refuse_on_the_command_line(name, what, make_federation):
    fed = make_federation(**({"participants": 3} if what == "choosing" else {}), **ASKING[what])
    assert fed.requirements == {what} | BESIDE.get(what, set())
    for make in (ALGORITHMS[name], lambda fed: made(name, fed, Config())):
        with pytest.raises(FLError, match=f"{name} .*: leave {REQUIREMENTS[what].flags} out"):
            make(fed)


NOT_PRIVATE = (
    *("clusamp", "fedbn", "feddyn", "fedexp", "fedgen", "fedmr", "fednova", "fedproto", "fedrep", "femam"),
    *("fedsa_lora", "fesem", "fesem_plus", "flora_na", "fltrust", "indep", "local", "scaffold"),
)


def test_who_refuses_what():
    assert set(REFUSALS) == {
        ("fedgen", "masked"),
        *((name, "adapters") for name in set(methods_of("heterogeneous")) - {"fedfa", "heterofl", *NEED_ADAPTERS}),
        *((name, "tampering") for name in ("flexlora", "flora", "flora_na", "hetlora")),
        ("fedgen", "loss"),
        *((name, "exits") for name in ("fedgen", "fedproto", "femam", "fjord", "inclusivefl", "moon")),
        ("femam", "masked"),
        *((name, "masked") for name in ("moon", "apfl", "fedproto")),
        *((name, "tampering") for name in ("local", "scaffold", "fednova", "feddyn", "fedproto")),
        ("clusamp", "presence"),
        *((name, "compression") for name in ("local", "scaffold", "feddyn", "fedproto")),
        *((name, "feedback") for name in ("fedmr", "indep", "fesem", "fesem_plus", "femam")),
        *((name, "privacy") for name in NOT_PRIVATE),
        *((name, "choosing") for name in ("fesem", "fesem_plus", "femam", "fltrust")),
    }
    assert set(ASKING) == set(REQUIREMENTS) - {"architectures"}  # which depends on the kind of method, see below
    asking = {
        "masked": {"masked_loss": True},
        "loss": {"class_weights": (1.0, 2.0)},
        "exits": {"exits": True},
        "adapters": {"adapters": AdapterOptions("lora")},
        "tampering": {"defence": Defence(rule="median")},
        "pace": {"pace": PaceOptions(spread=1.0)},
        "compression": {"compression": Compression("quantise")},
        "presence": {"leaving": 0.5},
        "privacy": {"privacy": Privacy(clip=1.0)},
        "architectures": {"architectures": ArchitectureOptions(widths=(0.5, 1.0))},
    }
    assert Config(defence=Defence("krum")).requirements == {"choosing", "tampering"}
    assert Config(compression=Compression("topk", feedback=True)).requirements == {"compression", "feedback"}
    for what, settings in asking.items():
        assert Config(**settings).requirements == {what}


def named(name):
    def make(fed, options=None):
        return options

    make.__name__ = name
    return make


@dataclasses.dataclass
class Loose:
    a: int = 1


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (lambda fed: None, {}, "make is a function with a name"),
        (functools.partial(named("x")), {}, "make is a function with a name"),
        (named("x"), {"options": Loose()}, "options are a frozen dataclass"),
        (named("x"), {"options": Attack}, "options are a frozen dataclass"),
        (named("x"), {"options": {"a": 1}}, "options are a frozen dataclass"),
        (named("x"), {"clients": "mixd"}, "clients is one of global, personalized, heterogeneous, got 'mixd'"),
        (named("x"), {"columns": {"drift": str}}, "columns are int or float"),
        (
            named("x"),
            {"refuses": {"masked_loss": "no"}},
            "refuses names some of masked, loss, tampering, choosing, ",
        ),
    ],
)
def test_what_is_no_method_is_refused(make, given, said):
    with pytest.raises(FLError, match=said):
        Method(make, **given)


def test_a_function_that_is_put_in_is_refused(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "mine", named("mine"))
    with pytest.raises(FLError, match=r"ALGORITHMS\['mine'\] is no Method: put Method\(mine\) there"):
        Config(algorithm="mine").check()


@pytest.mark.parametrize("name", ["model", "check", "attack", "cohort", "title"])
def test_a_method_cannot_hide_a_setting(name):
    """The settings' file is run anew, with such a method among those that there are."""
    source = (ROOT / "fl/settings/config.py").read_text()
    imported = "from fl.algorithms import ALGORITHMS, OPTIONS, methods_of"
    assert imported in source
    space = {"__name__": "fl.settings.again", "ALGORITHMS": {}, "OPTIONS": [name], "methods_of": None}
    with pytest.raises(FLError, match=f"cannot be called '{name}'"):
        exec(source.replace(imported, ""), space)


def test_a_method_with_one_model_refuses_clients_of_different_architectures():
    fed = fleet_federation(SPECS["cnn"], [(1.0, None), (0.5, None)], [4, 4])
    assert fed.requirements == {"architectures"}
    for name in ALGORITHMS.keys() - methods_of("heterogeneous"):
        with pytest.raises(FLError, match=f"{name} gives all clients one architecture: leave --architectures and"):
            made(name, fed, Config())
    algorithm = fedavg.make(fed)  # a bare function cannot know
    with pytest.raises(FLError, match=r"clients have models of \d architectures"):
        algorithm.round(algorithm.init(), [0, 1], Rng(0, 1))


def test_nothing_outside_knows_a_method_by_name():
    known = set()
    for file in (ROOT / "fl").rglob("*.py"):
        where = file.relative_to(ROOT)
        if where.parts[1] == "algorithms" or {"recipes", "papers"} & {*where.parts}:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in ALGORITHMS:
                known.add((str(where), node.value))
    rivals = {("fl/runs/summary.py", name) for name in ("fedavg", "fedprox")}  # which a run proposes to compare with
    assert known == {("fl/settings/fields.py", "fedmr")} | rivals  # the default
