"""What types say of settings holds: in a Config, on the command line, and where a method is used from Python."""

import dataclasses
import math
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import fl_refused

from fl import Config, Experiment, FLError
from fl.algorithms import ALGORITHMS
from fl.algorithms.fedprox import FedProxOptions
from fl.base.settings import (
    Bounds,
    Flag,
    OnlyWith,
    as_read,
    check_types,
    fits,
    flag_of,
    from_yaml,
    marks,
    settings_of,
    types_of,
)
from fl.settings import command_line
from fl.settings.config import RESUMABLE
from fl.settings.flags import entries
from fl.settings.places import OWN, PLACES

ENTRIES = [(name, one) for inside in entries(ALGORITHMS).values() for name, one in inside.items()]
FIELDS = [
    *(("", name, one.field) for name, one in ENTRIES if not one.group),
    *((name, field.name, field) for name, one in ENTRIES if one.group for field in dataclasses.fields(one.default)),
]
LIMITED = [
    (group, name, field, flag) for group, name, field in FIELDS for flag in marks(field, Flag) if flag.items is not None
]
BESIDE = {"class_share": "shards", "clusters": "clusters", "cluster_classes": "clusters"}
"""Partitions whose options are not those of the default one."""


@pytest.mark.parametrize(
    ("limits", "said", "formula", "inside", "outside"),
    [
        (Bounds(least=1), "1 or more", "X>=1", [1, 2.5], [0.9, 0]),
        (Bounds(above=0), "above 0", "X>0", [1e-9], [0, -1]),
        (Bounds(least=0, most=1), "between 0 and 1", "0<=X<=1", [0, 1], [-1e-9, 1.1]),
        (Bounds(above=0, most=1), "above 0 and at most 1", "0<X<=1", [0.1, 1], [0, 1.1]),
        (Bounds(least=0, below=0.5), "at least 0 and below 0.5", "0<=X<0.5", [0, 0.4], [0.5, -1]),
        (Bounds(most=2), "at most 2", "X<=2", [2, -9], [2.1]),
        (Bounds(least=2, zero=True), "2 or more, or 0", "X>=2|0", [0, 2], [1, -1]),
        (Bounds(), "", "X", [-1e300], [math.nan, math.inf, True, "1", None, (1,)]),
    ],
)
def test_settings__limits_are_what_they_say(limits, said, formula, inside, outside):
    assert str(limits) == said
    assert limits.around("X") == formula
    assert all(value in limits for value in inside)
    assert not any(value in limits for value in outside)


def outside(flag, kind):
    """Values of the field's type that it must not have."""
    if not isinstance(flag.items, Bounds):
        return ["no such name"]
    plain = int if types_of(kind)[0] == (int,) else float
    beyond = [bound + step for bound in dataclasses.astuple(flag.items)[:4] if bound is not None for step in (-1, 0, 1)]
    wrong = [plain(number) for number in beyond if plain(number) not in flag.items]
    return [*wrong, *([math.nan, math.inf] if plain is float else [])]


@pytest.mark.parametrize(("group", "name", "field", "flag"), LIMITED, ids=[flag_of(n, g) for g, n, *_ in LIMITED])
def test_settings__no_setting_takes_what_lies_outside(group, name, field, flag):
    wrong = outside(flag, field.type)
    assert wrong
    for bad in wrong:
        value = (bad,) if types_of(field.type)[1] else bad
        if group:
            options = dataclasses.replace(dict(ENTRIES)[group].default, **{name: value})
            config = Config.of(**{group: options}, algorithm=group if group in ALGORITHMS else "fedavg")
        else:
            config = Config.of(**{name: value}, partition=BESIDE.get(name, "dirichlet"))
        with pytest.raises(FLError, match=f"--{flag_of(name, group)}( |$)"):
            config.check_values()
        if group in ALGORITHMS:  # the method, which needs no more than this to refuse
            with pytest.raises(FLError, match=f"--{flag_of(name, group)} "):
                ALGORITHMS[group](Asking(), options)


class Asking:
    """A federation as far as a method may look at it before it has checked its options."""

    def needs(self):
        return {}


@dataclasses.dataclass(frozen=True)
class Chain:
    on: bool = False
    kind: Annotated[str, OnlyWith("on", True)] = "a"
    size: Annotated[int, OnlyWith("kind", "b", "c")] = 1


@dataclasses.dataclass(frozen=True)
class Links:
    chain: Chain = Chain()
    taken: bool = True

    def group_unread(self, group):
        return "" if self.taken else "needs --taken"


def unread(settings, flag):
    (reason,) = (one.unread for one in settings_of(settings) if one.flag == flag)
    return reason


def test_settings__a_setting_is_read_only_if_what_it_needs_is_read():
    assert unread(Chain(on=True, kind="b"), "size") == ""
    reason = "--chain.size is for --chain.kind b or c, not for a: leave it out, or give --chain.kind b or c"
    assert unread(Links(Chain(on=True)), "chain.size") == reason
    assert unread(Chain(kind="b"), "size") == "--kind is for --on True, not for False: leave it out, or give --on True"
    assert unread(Links(taken=False), "chain.on") == "--chain.on needs --taken"


def test_settings__what_is_not_read_has_its_default():
    links = Links(Chain(on=True, size=2))
    assert as_read(links) == Links(Chain(on=True))
    assert as_read(Links(Chain(on=True, kind="c", size=2))) == Links(Chain(on=True, kind="c", size=2))
    assert as_read(dataclasses.replace(links, taken=False)) == Links(taken=False)


def test_settings__all_settings_have_defaults_that_are_allowed():
    Config().check_values()
    for group, _, field in FIELDS:
        owner = dict(ENTRIES)[group].default if group else next(one.owner for _, one in ENTRIES if one.field is field)
        assert all(hasattr(owner, mark.setting) for mark in marks(field, OnlyWith)), field.name


def test_settings__what_a_run_may_change_when_it_goes_on_is_a_setting():
    assert {*PLACES, *OWN} >= RESUMABLE


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": None}, "--lr"),
        ({"rounds": 2.5}, "--rounds.*2.5"),
        ({"rounds": True}, "--rounds"),
        ({"flip": "no"}, "--flip.*'no'"),
        ({"model": 3}, "--model"),
        ({"seed": "a"}, "--seed.*'a'"),
        ({"algorithm": 5}, "--algorithm"),
        ({"alpha": "much"}, "--alpha.*'much'"),
        ({"algorithm": "fedprox", "fedprox": FedProxOptions("much")}, "--fedprox.mu.*'much'"),
    ],
)
def test_settings__a_value_of_another_type_is_refused(wrong, message):
    with pytest.raises(FLError, match=message):
        Config.of(**wrong).check()


def test_settings__numbers_of_numpy_lists_and_single_values_are_taken():
    experiment = Experiment.of(algorithms="fedavg", seeds=[0, 1], rounds=np.int64(3), lr=np.float32(0.1), width=1)
    experiment.check()
    assert (experiment.algorithms, experiment.seeds) == (("fedavg",), (0, 1))
    assert experiment.config.model.width == (1.0,)


NOT_FOR_SETTINGS = ["float", list[int], dict, Literal["a"], tuple[int, int], tuple[tuple[int, ...], ...], Any]


@pytest.mark.parametrize("kind", NOT_FOR_SETTINGS)
def test_settings__types_that_settings_cannot_have_are_refused(kind):
    made = dataclasses.make_dataclass("Made", [("value", kind, None)], frozen=True)
    with fl_refused("argument", "Made.value"):
        check_types(made())


KINDS = [int, float, str, bool, float | None, int | float, tuple[float, ...], tuple[str, ...]]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(KINDS), st.data())
def test_settings__what_has_a_type_is_the_same_from_yaml(kind, data):
    plain = {int: st.integers(), float: st.floats(allow_nan=False), str: st.sampled_from("ab1"), bool: st.booleans()}
    kinds, several = types_of(kind)
    one = st.one_of(*(plain.get(option, st.none()) for option in kinds))
    value = data.draw(st.lists(one).map(tuple) if several else one)
    assert fits(kind, value)
    assert from_yaml(kind, list(value) if several else value) == value


@pytest.mark.parametrize("given", ["1,,2", "1,2,", ",1"])
def test_settings__a_list_with_an_empty_item_is_refused(given):
    with fl_refused("argument: --seeds", f"'{given}'"):
        command_line.parse(["--seeds", given])
