"""Everything of `graphs` but the capture: fixed inputs, turns, ragged clients, and when a step is captured anew."""

import dataclasses
import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from selection import some
from torch import nn

import surgery
import zoo
from fl.algorithms.fedasam import adaptive_ascent
from fl.base.rng import Rng
from fl.engine import SGD, Adam, graphs
from fl.engine.eager import loop
from fl.engine.objectives import cross_entropy, mask_absent_classes, proximal, with_logits
from fl.federation.local_training import LocalObjective


@pytest.fixture
def captures(monkeypatch):
    """The steps that were captured: a capture is the step itself."""
    made = []
    monkeypatch.setattr(graphs, "_KEPT", type(graphs._KEPT)())
    return made


def play(groups, captures, places=1, warm_up=False):
    def capture(step, _):
        captures.append(step)
        if warm_up:
            step()  # it changes weights and memory, which must not show
        return step

    return graphs._side_by_side(groups, [nullcontext()] * places, capture)


def group(fed, number, each=LocalObjective(), clients=(0, 1, 2)):
    return fed.group(fed.model, surgery.broadcast(fed.initial(), len(clients)), clients, each, Rng(0, number))


def assert_close(found, expected):
    for one, other in ((found.loss, expected.loss), (found.states, expected.states)):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


PLAIN, ASCENDING = (Adam(2**-6), None), (SGD(2**-5, 0.9), adaptive_ascent(0.1))


@pytest.mark.parametrize(
    ("optimizer", "ascent", "places"),
    some(
        ((*how, places) for how in (PLAIN, ASCENDING) for places in (1, 2, 8)),
        [(*PLAIN, 1), (*ASCENDING, 2), (*PLAIN, 8)],
    ),
)
def test_graphs__clients_of_several_architectures_take_turns(make_federation, captures, places, optimizer, ascent):
    fed = make_federation("cnn", dtype=torch.float64, optimizer=optimizer, schedule=lambda number: 2.0**-number)
    size = {"num_classes": 3, "in_channels": 1, "image_size": 8}
    models = [zoo.create("cnn", torch.Generator().manual_seed(1), **size, width=w).double() for w in (0.25, 0.125)]
    objective = proximal(0.125)
    for number in (1, 2):
        groups = []
        for model, clients in zip(models, ([3, 2], [1, 0])):
            state = surgery.state(model)
            starts = surgery.stack([{n: t + 0.01 * k * number for n, t in state.items()} for k in clients])
            each = LocalObjective(objective, {"anchor": starts}, ascent)
            groups.append(fed.group(model, starts, clients, each, Rng(0, number)))
        for found, expected in zip(play(groups, captures, places, warm_up=True), loop(groups)):
            assert_close(found, expected)
        if number == 1:
            first = len(captures)
    assert len(captures) <= 2 * first  # places take clients as they come free, and keep what they have captured
    play([(dataclasses.replace(job, objective=proximal(0.5)), *rest) for job, *rest in groups], captures, places)
    assert len(captures) > first


@pytest.mark.slow
def test_graphs__captures_are_kept_while_the_job_is_the_same_and_go_with_the_model(make_federation, captures):
    fed = make_federation("cnn", optimizer=SGD(0.1))

    def count(fed, numbers, each=LocalObjective()):
        before = len(captures)
        for number in numbers:
            play([group(fed, number, each)], captures)
        return len(captures) - before

    assert count(fed, (1, 2, 3)) == 1
    assert count(fed.with_local(optimizer=SGD(0.2)), [4]) == 0  # a rate is no part of what is captured
    assert count(fed.with_local(optimizer=SGD(0.2, 0.5)), [5]) == 1
    spoilt = dataclasses.replace(fed, data=dataclasses.replace(fed.data, y=fed.data.y.flip(0)))
    # under an attack two sets of data take turns; what was captured of the honest data in round 1 is there still
    assert sum(count(data, [number]) for number in (6, 7, 8) for data in (fed, spoilt)) == 1
    # what masks the loss is the same in every round
    assert (
        sum(
            count(fed, [n], LocalObjective(mask_absent_classes(), {"held": fed.true_classes(range(3))}))
            for n in (9, 10)
        )
        == 1
    )
    captures.clear()
    del fed, spoilt
    gc.collect()
    assert not graphs._KEPT


@dataclasses.dataclass(slots=True)
class Slots:
    rate: float = 1.0


class Shifted(nn.Linear):
    """A model whose settings its printed form does not show."""

    def __init__(self):
        super().__init__(64, 3)
        self.shift, self.by_name, self.table = 0.0, {"factors": [1.0]}, torch.ones(3)
        self.options, self.slots = SimpleNamespace(sign=1.0), Slots()

    def forward(self, x):
        factor = self.by_name["factors"][0] * self.options.sign * self.slots.rate
        return super().forward(x.flatten(1)) * factor * self.table + self.shift


CHANGES = {
    "a number": lambda net: setattr(net, "shift", 0.5),
    "a list in a dict": lambda net: net.by_name["factors"].append(2.0),
    "an item of a list in a dict": lambda net: net.by_name["factors"].__setitem__(0, 2.0),
    "a tensor": lambda net: setattr(net, "table", torch.ones(3)),
    "a tensor in place": lambda net: net.table.mul_(-1),
    "an object's attribute": lambda net: setattr(net.options, "sign", -1.0),
    "an object's slot": lambda net: setattr(net.slots, "rate", 2.0),
    "a hook": lambda net: net.register_forward_hook(lambda module, given, out: -out),
    "a frozen parameter": lambda net: net.bias.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", some([0, 1], [1]))
def test_graphs__a_model_that_was_changed_is_captured_anew(make_federation, captures, place, change):
    """In whichever of its modules it was."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Shifted(), Shifted()])

        def forward(self, x):
            return self.parts[0](x) + self.parts[1](x)

    fed = make_federation(Both(), optimizer=SGD(0.1))
    for number, mode in enumerate((True, True, False)):  # it trains in training mode whatever it was in
        fed.model.train(mode)
        play([group(fed, number)], captures)
    assert len(captures) == 1
    CHANGES[change](fed.model.parts[place])
    play([group(fed, 4)], captures)
    assert len(captures) == 2
    fed.model.parts[place] = Shifted()
    play([group(fed, 5)], captures)
    assert len(captures) == 3


def test_graphs__a_capture_reads_what_stands_beside_the_samples_in_its_round(make_federation, captures):
    """The first table is gone when the second comes, and its place in memory may be taken."""
    fed, objective = make_federation("cnn", dtype=torch.float64, optimizer=SGD(2**-5)), with_logits(cross_entropy)
    for number, scale in enumerate((1.0, 1.0, -1.0), 1):
        if number != 2:
            generator = torch.Generator().manual_seed(0)
            table = scale * torch.rand(len(fed.data.y), 3, generator=generator, dtype=torch.float64)
        one = group(fed, number, LocalObjective(objective, {}, per_sample=table))
        assert_close(play([one], captures)[0], loop([one])[0])
        assert len(captures) == {1: 1, 2: 1, 3: 2}[number]
