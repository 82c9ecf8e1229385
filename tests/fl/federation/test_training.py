"""A federation, how a cohort of it trains, and clients that diverge."""

import re
import traceback
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from fl_flags import TINY
from fleets import assert_close
from refusals import fl_refused
from rounds import assert_same, play, poison, row
from safetensors.torch import load_file
from selection import some
from torch import nn

import surgery
import zoo
from fl import run as cli
from fl.algorithms.fedavg import METHOD as fedavg
from fl.base.errors import Diverged, FLError
from fl.base.rng import Rng
from fl.engine import GroupResults
from fl.engine.objectives import cross_entropy, proximal
from fl.extensions.defence import Defence
from fl.extensions.pace import PaceOptions
from fl.federation import Federation, LocalTraining, cohort
from fl.federation.clients import update_states
from fl.federation.divergence import check_finite, drop_failed
from fl.federation.update import ClientUpdate
from fl.runs.assembly import build
from fl.runs.metrics import read
from fl.settings import Config
from surgery import Plan, stack, unstack
from surgery.plan import Source

CLIENTS, SIZES = [3, 1, 0, 2], (5, 7, 3, 12)
FORMS = ["stack", "list"]


# The two forms of a cohort's states


@pytest.fixture
def states():
    generator = torch.Generator().manual_seed(0)
    each = [{"w": torch.randn(2, 3, generator=generator), "steps": torch.tensor(k)} for k in range(4)]
    return {"stack": stack(each), "list": each}


def same(found, expected, form):
    """`found` has this form, and is the list `expected`."""
    assert isinstance(found, dict if form == "stack" else list)
    for one, other in zip(cohort.per_client(found), expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [[2, 0], [1, 2], [3], [0, 1, 2, 3], [1, 3]])
def test_training__rows_are_selected_and_replaced(states, form, rows):
    own, every = states[form], states["list"]
    same(cohort.select(own, rows), [every[k] for k in rows], form)
    assert torch.equal(cohort.select(own, rows, stacked=True)["w"], torch.stack([every[k]["w"] for k in rows]))
    new = [{name: tensor + 7 for name, tensor in every[k].items()} for k in rows]
    after = [new[rows.index(k)] if k in rows else state for k, state in enumerate(every)]
    same(cohort.replace_rows(own, rows, new if form == "list" else stack(new)), after, form)


@pytest.mark.parametrize("form", FORMS)
def test_training__stacks_have_an_inverse_and_parts_come_together_in_order(states, form):
    every, losses = states["list"], torch.arange(4.0)
    parts = cohort.stacks(states[form])
    assert [len(part["w"]) for part in parts] == ([4] if form == "stack" else [1] * 4)
    same(cohort.as_before(states[form], parts), every, form)
    same(cohort.per_client(states[form]), every, "list")
    rows = [[0, 1], [2, 3]] if form == "stack" else [[2, 0], [3, 1]]
    trained = [(some, GroupResults(stack([every[k] for k in some]), losses[some])) for some in rows]
    found, loss = cohort.join_results(trained, states[form])
    same(found, every, form)
    assert torch.equal(loss, losses)


# Federations


def test_training__a_federation_varied_keeps_all_else(make_federation):
    fed = make_federation(defence=Defence("median"), truth=torch.zeros(1, 4))
    other = fed.with_local(epochs=9)
    for setting in fields(Federation):
        if setting.init and setting.name != "local":
            assert getattr(other, setting.name) is getattr(fed, setting.name), setting.name
    assert other.local == replace(fed.local, epochs=9)
    assert other.local.chosen is fed.local.chosen  # a run keeps all that `auto` has chosen
    assert Federation(fed.model, fed.data, fed.clients, 2).local.chosen is not LocalTraining().chosen


def test_training__what_makes_no_federation_is_refused(make_federation):
    fed = make_federation()
    for changes, message in (
        ({"local": 1}, "LocalTraining"),
        ({"participants": 5}, "5 participants a round: there are 4 clients"),
        ({"model": nn.Linear(64, 3).requires_grad_(False)}, "all are frozen"),
        ({"clients": [fed.clients[0], *[fed.clients[0]._replace(train=torch.arange(0))] * 2]}, r"client 1 .*\(2 such"),
        ({"clients": []}, "there are 0 clients"),
    ):
        with pytest.raises(FLError, match=message):
            replace(fed, **{"participants": 1, **changes})


def test_training__a_trained_block_for_which_a_frozen_one_stands_is_averaged(make_federation):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 3))
    net[1].requires_grad_(False)
    fed = make_federation(net)
    shape, whole = (64, 64), (None, None)
    plan = Plan(
        {"1.weight": (Source("1.weight", whole), Source("2.weight", whole))}, {"1.weight": shape, "2.weight": shape}
    )
    before = {"1.weight": torch.zeros(shape), "2.weight": torch.zeros(shape)}
    mean = fed.average([{"1.weight": torch.ones(shape)}], [1], before, plans=[plan])
    assert (mean["1.weight"] == 0).all()
    assert (mean["2.weight"] == 1).all()


@pytest.mark.parametrize(
    ("form", "backend", "chunk"),
    some(
        product(FORMS, ("loop", "workers", "vmap"), (0, 3)),
        [("stack", "loop", 3), ("list", "loop", 0), ("stack", "vmap", 0), ("list", "vmap", 3), ("list", "workers", 3)],
    ),
)
def test_training__a_cohort_is_its_clients_one_by_one(make_federation, form, backend, chunk):
    """Also of two architectures, the second of them twice in a row, and a few clients at a time."""
    fed = make_federation("cnn", dtype=torch.float64, backend=backend, max_parallel_clients=chunk)
    models, rng, pulled = [fed.model] * 4, Rng(0, 3), proximal(0.1)
    if form == "list":
        size = {"num_classes": 3, "in_channels": 1, "image_size": 8}
        wide, narrow = (zoo.create("cnn", **size, width=width).double() for width in (0.25, 0.125))
        models = [wide, narrow, narrow, wide]
    starts = [{n: t + 0.01 * k for n, t in surgery.state(m).items()} for k, m in enumerate(models)]
    given = starts if form == "list" else stack(starts)
    anchors = [{"anchor": start} for start in starts] if form == "list" else {"anchor": given}
    trained = fed.train(given, CLIENTS, rng, pulled, anchors, models=models)
    assert trained.sizes == SIZES
    assert trained.received is trained.states
    assert re.match(r"ClientUpdate: 4 clients, .*; 4 arrived\n  mean loss ", repr(trained))
    for k, (model, client, state) in enumerate(zip(models, CLIENTS, cohort.per_client(trained.states))):
        single, start = replace(fed.with_local(backend="loop"), model=model), stack([starts[k]])
        alone = single.train(start, [client], rng, pulled, {"anchor": start})
        torch.testing.assert_close(trained.loss[k], alone.loss[0], rtol=1e-9, atol=1e-9)
        assert_close(state, row(alone.states, 0), atol=1e-9)
    with fl_refused("argument"):
        fed.train(cohort.select(given, [0, 1, 2]), CLIENTS, rng, models=models)


class Counting(nn.Linear):
    """A linear model of 64 pixels that counts the samples it is called with."""

    seen = 0

    def forward(self, x):
        Counting.seen += 0 if x.is_meta else len(x)  # the meter counts on the meta device
        return super().forward(x.flatten(1))


def seen(fed, clients=(0, 1, 2, 3), **settings):
    """The trained states, the samples that the model saw, and what the meter says of them."""
    fed = fed.with_local(**settings)
    Counting.seen, _ = 0, fed.meter.read()
    trained = fed.train(surgery.broadcast(fed.initial(), len(clients)), list(clients), Rng(0, 1))
    return trained.states, Counting.seen, fed.meter.read() / (2 * 64 * 3)


def test_training__what_is_counted_is_what_the_model_saw(make_federation):
    """Of clients with 3, 7, 12 and 5 samples; a batch larger than all of them holds what the largest client has."""
    fed = make_federation(Counting(64, 3), backend="loop", epochs=1)
    for size, expected in ((4, 4 + 8 + 12 + 8), (5, 5 + 10 + 15 + 5), (12, 4 * 12), (100, 4 * 12), (10**30, 4 * 12)):
        assert seen(fed, batch_size=size)[1:] == (expected, expected)
    assert seen(fed, batch_size=4, last_batch="partial")[1:] == (27, 27)
    assert_same(seen(fed, batch_size=12)[0], seen(fed, batch_size=10**30)[0])


@pytest.mark.parametrize("chunk", [0, 2])
def test_training__a_client_learns_the_same_whoever_trains_beside_it(make_federation, chunk):
    """The size of batches depends on the largest client of all, not on the largest of those who train together."""
    fed = make_federation(Counting(64, 3), backend="loop", max_parallel_clients=chunk, batch_size=100)
    together = seen(fed)[0]
    for client in range(4):
        assert_same(row(seen(fed, [client])[0], 0), row(together, client))


def test_training__the_way_of_a_batch_is_short_and_as_the_page_says(make_federation):
    """From a method's round to the backward pass of a step."""
    ways = []

    class Recording(nn.Linear):
        def forward(self, x):
            logits = super().forward(x.flatten(1))
            logits.register_hook(lambda _: ways.append(traceback.extract_stack()))
            return logits

    fed = make_federation(Recording(64, 3), backend="loop")
    algorithm, root = fedavg(fed), Path(__file__).parents[3]
    algorithm.round(algorithm.init(), [0, 1, 2], Rng(0, 1))
    way = [(frame.filename.removeprefix(f"{root}/"), frame.name) for frame in ways[0]]
    way = [(file, name) for file, name in way if file.startswith("fl/")]
    assert len(way) <= 11, way
    page = (root / "docs/explanation/engine.md").read_text().split("## The way of a batch")[1].split("\n## ")[0]
    assert re.findall(r"^\d+\. `(.*?)`, `(.*?)`", page, re.MULTILINE) == way


# Clients that diverge


def scaled(call, params, context, batch):
    return cross_entropy(call, params, context, batch) * context["scale"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_training__a_diverging_client_keeps_its_start_and_the_others_do_not_notice(
    make_federation, backend, form, caplog
):
    fed = make_federation("resnet20", backend=backend)
    starts, rng = surgery.broadcast(fed.initial(), 3), Rng(0, 7)

    def after(*factors):
        scales, begun = {"scale": torch.tensor(factors)}, starts
        if form == "list":
            scales, begun = unstack(scales), unstack(starts)
        return fed.train(begun, [2, 0, 3], rng, scaled, scales)

    well, ill = after(1.0, 1.0, 1.0), after(1.0, torch.inf, 1.0)
    assert (well.sizes, ill.sizes) == ((12, 3, 5), (12, 0, 5))
    expected = [cohort.per_client(well.states)[k] if k != 1 else unstack(starts)[1] for k in range(3)]
    same(ill.states, expected, form)
    (record,) = caplog.records
    assert record.getMessage() == "warning: round 7: client 0 dropped: loss or weights became infinite or not a number"
    with fl_refused("diverged", "--lr"):
        after(torch.nan, torch.nan, torch.nan)


def test_training__a_dropped_client_keeps_what_it_had():
    before, after = {"w": torch.zeros(4, 1)}, {"w": torch.ones(2, 1)}
    update = ClientUpdate(after, torch.zeros(2), (0, 5), after, client_states=after)
    assert update_states(before, [3, 1], update)["w"].flatten().tolist() == [0, 1, 0, 0]


def test_training__large_numbers_and_masks_of_infinity_are_no_failure():
    """Sums that overflow, and buffers that were infinite from the start."""
    starts = {"w": torch.zeros(2, 3), "mask": torch.tensor([[0.0, -torch.inf]] * 2), "steps": torch.ones(2).long()}
    states = {**starts, "w": torch.full((2, 3), 3e38)}
    kept, sizes = drop_failed(states, torch.ones(2), starts, [5, 6], [7, 8], 1)
    assert sizes == (7, 8)
    assert kept is states
    states["w"][1, 2] = torch.nan
    kept, sizes = drop_failed(states, torch.ones(2), starts, [5, 6], [7, 8], 1)
    assert sizes == (7, 0)
    assert torch.equal(kept["w"][1], starts["w"][1])


def test_training__a_run_goes_on_without_the_client(tmp_path, monkeypatch, capsys):
    poison(monkeypatch, {2}, [0])
    assert cli.main([*TINY, "--rounds", "3", "--out", str(tmp_path), "--name", "a"]) == 0
    assert [row.get("dropped", 0) for row in read(tmp_path / "a" / "metrics.csv")] == [0, 1, 0]
    client = build(Config.read(tmp_path / "a"))[0].sample(Rng(0, 2))[0]
    assert f"round 2: client {client} dropped" in capsys.readouterr().err
    assert all(t.isfinite().all() for t in load_file(tmp_path / "a" / "checkpoint.safetensors").values())


def test_training__steps_are_counted_once_a_round(monkeypatch):
    counted, steps = [], Federation.steps
    monkeypatch.setattr(Federation, "steps", lambda fed, clients: counted.append(clients) or steps(fed, clients))
    pace = PaceOptions(spread=1.0, speed=200.0, deadline=0.15)
    fed, algorithm = build(
        Config.of(algorithm="fedavg", clients=4, participants=3, local_epochs=1, width=0.1, pace=pace)
    )
    play(algorithm, fed, rounds=1)
    assert len(counted) == 1


# Servers that diverge


@pytest.mark.parametrize("lost", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("part", ["global", "squares", "new"])
def test_training__a_server_that_is_no_longer_finite_is_named(part, lost):
    before = {"global": {"w": torch.zeros(2, 3)}, "squares": {"w": torch.ones(2, 3, dtype=torch.float64)}}
    after = {**before, "new": {"n": torch.ones(2, dtype=torch.int64), "w": torch.ones(4, 2, 3).half()}}
    assert check_finite(after, before, torch.tensor([1.0, 2.0]), 3).tolist() == [1, 2]
    ill = after[part]["w"].clone()
    ill[-1, -1, ...] = lost
    with pytest.raises(Diverged, match=f"in round 3 the server's {part}/w became"):
        check_finite({**after, part: {**after[part], "w": ill}}, before, torch.ones(2), 3)


def test_training__sums_that_overflow_masks_and_losses_of_nobody_are_no_failure_of_a_server():
    mask = torch.tensor([0.0, -torch.inf])
    before = {"global": {"w": torch.zeros(2), "mask": mask}, "level": {"mask": mask.expand(2, 2)}}
    after = {"global": {"w": torch.full((2,), 3e38), "mask": mask.clone()}, "level": {"mask": mask.expand(3, 2)}}
    loss = check_finite(after, before, torch.tensor([1.0, torch.nan]), 1)
    torch.testing.assert_close(loss, torch.tensor([1.0, torch.nan]), equal_nan=True)
