"""A file with a METHOD is all that it takes to add one, and nothing else knows methods by name."""

import ast
import dataclasses
import functools
import importlib
from pathlib import Path

import pytest
import torch
from fleets import SPECS, fleet_federation
from ranks import NEED_ADAPTERS
from refusals import fl_refused
from rounds import made
from torch import nn
from wrapped import within

from fl import ArchitectureOptions, Config, FLError
from fl.algorithms import ALGORITHMS, methods_of
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.method import Method
from fl.base.rng import Rng
from fl.engine.losses import by_name
from fl.extensions.attack import Attack, AttackOptions
from fl.extensions.compression import Compression
from fl.extensions.defence import Defence
from fl.extensions.language.adapters import AdapterOptions, add_adapters
from fl.extensions.pace import Pace, PaceOptions
from fl.extensions.presence import Presence, PresenceOptions
from fl.extensions.privacy import Privacy
from fl.federation.capabilities import CAPABILITIES
from fl.settings.places import check_names

ROOT = Path(__file__).parents[3]


def test_method__a_method_s_file_is_its_module_and_has_its_options():
    for name, method in ALGORITHMS.items():
        module = importlib.import_module(method.make.__module__)
        assert module.__name__.endswith(f".algorithms.{name}")
        assert method is module.METHOD


FOR_FEDERATIONS = {  # what a federation is made with, and what a method must be able to do there
    "masked": ({"masked": True}, {"masked_logits"}),
    "loss": ({"loss": by_name("focal", "classification")}, {"any_loss"}),
    "exits": ({"model": "resnet20", "exits": True}, {"several_classifiers"}),
    "adapters": ({"model": add_adapters(nn.Linear(64, 3), AdapterOptions("lora"), torch.Generator())}, {"low_rank"}),
    "defence": ({"defence": Defence(rule="median")}, {"changed_updates", "plain_average"}),
    "choosing": (
        {"defence": Defence(rule="krum", malicious=0)},
        {"changed_updates", "plain_average", "whole_average", "open_updates"},
    ),
    "pace": ({"pace": Pace(torch.ones(4, dtype=torch.float64))}, {"one_training"}),
}
FOR_ALGORITHMS = {  # what wraps a method, and what it must be able to do there
    "compression": ({"compression": Compression("topk")}, {"changed_updates", "open_updates"}),
    "feedback": (
        {"compression": Compression("topk", feedback=True)}, {"changed_updates", "open_updates", "same_model"}
    ),
    "clip": ({"defence": Defence(clip=1.0)}, {"changed_updates", "plain_average", "open_updates"}),
    "privacy": ({"privacy": Privacy(clip=1.0, noise=0.0)}, {"mean_only"}),
    "presence": ({"presence": Presence(torch.ones(4), torch.full((4,), 9))}, {"uniform_sampling"}),
}  # fmt: skip


@pytest.mark.parametrize("what", FOR_FEDERATIONS)
def test_method__methods_refuse_a_federation_that_needs_what_they_lack(what, make_federation):
    settings, needs = FOR_FEDERATIONS[what]
    fed = make_federation(**settings)
    assert fed.needs().keys() == needs
    for name, method in ALGORITHMS.items():
        if lacking := needs & method.all_lacks:
            for make in (method, lambda fed, name=name: made(name, fed, {})):
                with pytest.raises(FLError, match=f"{name} .*: leave {fed.needs()[min(lacking)]} out"):
                    make(fed)
        else:
            method.refuse(fed.needs())


@pytest.mark.parametrize("what", FOR_ALGORITHMS)
def test_method__methods_refuse_to_be_wrapped_by_what_needs_more_than_they_can(what, make_federation):
    around, needs = FOR_ALGORITHMS[what]
    for name, method in ALGORITHMS.items():
        if method.clients == "heterogeneous" or name in NEED_ADAPTERS:
            continue
        algorithm = made(name, make_federation("resnet20" if name == "fedbn" else "cnn"))
        if needs & method.all_lacks:
            with pytest.raises(FLError, match=f"{name} .*: leave --.* out"):
                within(algorithm, **around)
        else:
            within(algorithm, **around)


NOT_PRIVATE = (
    *("clusamp", "fedbn", "feddyn", "fedexp", "fedgen", "fedmd", "fedmr", "fednova", "fedproto", "fedrep", "femam"),
    *("fedsa_lora", "fesem", "fesem_plus", "flora_na", "fltrust", "indep", "local", "scaffold"),
)
OWN = {"fedmd", "fedproto", "local"}
CLUSTERING = ("fesem", "fesem_plus", "femam")


def test_method__who_lacks_what():
    expected = {what: set(names) for what, names in {
        "masked_logits": ("fedgen", "femam", "moon", "apfl", "fedmd", "fedproto"),
        "low_rank": set(methods_of("heterogeneous")) - {"fedfa", "heterofl", *NEED_ADAPTERS},
        "plain_average": ("flexlora", "flora", "flora_na", "hetlora", "fednova"),
        "any_loss": ("fedgen",),
        "several_classifiers": ("fedgen", "fedmd", "fedproto", "femam", "fjord", "inclusivefl", "moon"),
        "changed_updates": ("local", "scaffold", "feddyn", "fedmd", "fedproto"),
        "uniform_sampling": ("clusamp",),
        "same_model": ("fedmr", "indep", *CLUSTERING, *methods_of("heterogeneous")),
        "mean_only": (*NOT_PRIVATE, *methods_of("heterogeneous")),
        "whole_average": (*CLUSTERING, "fltrust", *methods_of("heterogeneous")),
        "one_training": methods_of("personalized"),
        "architectures": {*methods_of("global"), *methods_of("personalized")} - OWN,
        "own_architectures": ALGORITHMS.keys() - OWN,
        "dense": ("fedgen", "fedproto"),
        "open_updates": (),
    }.items()}  # fmt: skip
    assert expected.keys() == CAPABILITIES.keys()
    for what, names in expected.items():
        assert {name for name, method in ALGORITHMS.items() if what in method.all_lacks} == names, what


def test_method__settings_ask_for_the_same():
    for settings, needs in (
        ({"masked_loss": True}, {"masked_logits"}),
        ({"class_weights": (1.0, 2.0)}, {"any_loss"}),
        ({"exits": True}, {"several_classifiers"}),
        ({"adapters": AdapterOptions("lora")}, {"low_rank"}),
        ({"defence": Defence(rule="median")}, FOR_FEDERATIONS["defence"][1]),
        ({"defence": Defence("krum")}, FOR_FEDERATIONS["choosing"][1]),
        ({"attack": AttackOptions(share=0.5)}, {"changed_updates", "plain_average"}),
        ({"pace": PaceOptions(spread=1.0)}, {"one_training"}),
        ({"compression": Compression("quantise")}, FOR_ALGORITHMS["compression"][1]),
        ({"compression": Compression("topk", feedback=True)}, FOR_ALGORITHMS["feedback"][1]),
        ({"presence": PresenceOptions(leaving=0.5)}, {"uniform_sampling"}),
        ({"privacy": Privacy(clip=1.0)}, {"mean_only"}),
        ({"architectures": ArchitectureOptions(widths=(0.5, 1.0))}, {"architectures"}),
        ({}, set()),
    ):
        assert Config.of(**settings).asks().keys() == needs


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
        (named("x"), {"clients": "mixd"}, "'mixd'"),
        (named("x"), {"columns": {"drift": str}}, "columns are int or float"),
        (named("x"), {"lacks": {"masked_loss"}}, "mean_only.*changed_updates"),
    ],
)
def test_method__what_is_no_method_is_refused(make, given, said):
    with pytest.raises(FLError, match=said):
        Method(make, **given)


def test_method__a_function_that_is_put_in_is_refused(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "mine", named("mine"))
    with fl_refused("argument", "ALGORITHMS", "'mine'"):
        Config.of(algorithm="mine").check()


@pytest.mark.parametrize("name", ["model", "local", "rounds", "lr"])
def test_method__a_method_cannot_hide_a_setting(name, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, name, ALGORITHMS["fedprox"])
    with fl_refused("name", f"cannot be called '{name}'"):
        Config.of(algorithm=name)


def test_method__an_extension_cannot_be_called_as_a_method(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "attack", ALGORITHMS["fedprox"])
    with fl_refused("name", "'attack'"):
        check_names()


@pytest.mark.parametrize("client", [-1, 4])
def test_method__a_round_of_a_client_that_there_is_not_is_refused(client, make_federation):
    """The client -1 would be the last one, with random numbers of its own."""
    method = fedavg(make_federation())
    with fl_refused("run", str(client)):
        method.round(method.init(), [0, client], Rng(0, 1))


def test_method__a_method_with_one_model_refuses_clients_of_different_architectures():
    fed = fleet_federation(SPECS["cnn"], [(1.0, None), (0.5, None)], [4, 4])
    assert fed.needs().keys() == {"architectures"}
    for name in ALGORITHMS.keys() - OWN - set(methods_of("heterogeneous")):
        with fl_refused("unsupported", f"{name} gives all clients one architecture: leave --architectures"):
            made(name, fed, {})
    algorithm = fedavg.make(fed)  # a bare function cannot know
    with fl_refused("unsupported", "fleet="):
        algorithm.round(algorithm.init(), [0, 1], Rng(0, 1))


def test_method__nothing_outside_knows_a_method_by_name():
    known = set()
    for file in (ROOT / "fl").rglob("*.py"):
        where = file.relative_to(ROOT)
        if where.parts[1] == "algorithms" or where.name == "recipes.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in ALGORITHMS:
                known.add((str(where), node.value))
    rivals = {("fl/runs/summary.py", name) for name in ("fedavg", "fedprox")}  # which a run proposes to compare with
    topic = {one for one in known if one[0].startswith("fl/settings/") and one[1] == "local"}  # the name of settings
    assert known - topic == {("fl/settings/places.py", "fedmr")} | rivals  # the default
