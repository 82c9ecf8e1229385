"""What a GPU would have to do in a round of every method, rehearsed without one: waits, captures and launches."""

import copy
import dataclasses
import json
import weakref
from collections import Counter
from contextlib import nullcontext
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from fl_flags import OF_METHOD, TINY
from fleets import SPECS, fleet_federation
from launch_counts import CASES, measure
from pretend_gpu import Forbidden
from refusals import fl_refused
from rounds import on_gpu
from selection import some
from torch import nn

import surgery
from fl.algorithms import ALGORITHMS
from fl.base.rng import Rng
from fl.engine import BACKENDS, SGD, admission, graphs, train, trial
from fl.engine.augment import Augment
from fl.engine.objectives import cross_entropy, with_logits
from fl.federation.local_training import LocalObjective
from fl.runs.assembly import pick_device
from fl.runs.round import one_round
from fl.runs.state import RunState
from fl.settings.command_line import parse

STORED = Path(__file__).parents[2] / "benchmarks/results/launches.json"

ANY = 6
"""How often the host waits for the device in a round of any method: for whose numbers are finite, the loss, the cosine,
the server's model, the clients' scores and those on the common test set.
"""

MORE = {
    "clusamp": 1,  # the angles between clients, which SciPy clusters
    "fedexp": 1,  # a column of the metrics
    "flexlora": 4,  # a column of the metrics, and a decomposition for each layer
    "flora_na": 2,  # clients' matrices, and the numbers that join them
    "hetlora": 1,  # the norms of products, which are weights
    "fedavg_plus": 1,  # fine-tuning drops clients, too
    "fesem_plus": 2,
    "fltrust": 2,  # the server trains as well, and its trust is weights
    "fedrep": 1,  # heads and bodies are trained apart
    "fedmd": 1,  # a client digests logits, and then trains
    "ditto": 1,  # so are global and personal models
    "fesem": 1,  # who belongs where
    "femam": 2,  # and who keeps the level
    "fedfa": 1,  # the weights' norms
    "heterofl": 1,  # the classes of clients that are new
    "fedrolex": 1,
}


def play(run):
    """Do the rounds of a run, one whenever it is asked for the next."""
    for number in run.numbers_left():
        run.record(number, *one_round(run, number))
        yield


def seen_in_rounds(gpu, folder, name, *flags, rounds):
    """What the device saw of each of some rounds, evaluation included, with few clients."""
    tiny = [*TINY, "--participants", "3", "--samples", "400", "--local-test", "0.1", "--device", "cuda"]
    config = parse([*tiny, "--algorithm", name, *OF_METHOD.get(name, []), *flags]).one_run()
    played = play(RunState.prepare(config.replace(rounds=rounds), folder, False).begin(resume=False))
    for _ in range(rounds):
        with gpu.watch() as seen:
            next(played)
        yield seen


SETTINGS = {
    "": [],
    "static batch norm": ["--model", "resnet9", "--width", "0.5", "--norm", "static_batch"],
    "attack": ["--attack.share", "0.5", "--attack.amplify", "3", "--defence.clip", "1"],
    "masked loss": ["--masked-loss"],
    "privacy": ["--privacy.clip", "1", "--privacy.noise", "0", "--privacy.quantile", "0.5"],
    "median": ["--defence.rule", "median"],
    "bulyan": ["--defence.rule", "bulyan", "--defence.malicious", "0", "--participants", "4"],
    "top-k": ["--compression.kind", "topk", "--compression.share", "0.1", "--compression.feedback"],
    "quantised": ["--compression.kind", "quantise"],
    "fleet": ["--architectures.widths", "0.5,1", "--architectures.choose", "cycle"],
    "batch norm": ["--model", "resnet9", "--width", "0.5"],
}
QUICK = [
    *product(("graphs",), ("fedavg", "clusamp", "fedmr", "femam", "fedfa"), [""]),
    *product(("loop", "vmap"), ("fedavg", "fedmr"), [""]),
    ("graphs", "heterofl", "fleet"),
    *product(("graphs",), ("fedavg",), ("static batch norm", "attack", "bulyan", "privacy", "top-k", "quantised")),
]


def possible(case):
    """Whether a method's clients may have several architectures, and whether it sends what could be changed."""
    _, name, what = case
    if what in ("bulyan", "privacy", "top-k"):
        return name == "fedavg"
    return name == "heterofl" if what == "fleet" else name != "local" or what not in ("attack", "median", "quantised")


SLOW = [
    *product(("graphs",), ALGORITHMS, [""]),
    *((backend, name, "") for name, backend in zip(ALGORITHMS, cycle(("loop", "vmap")))),
    *filter(possible, product(("graphs",), ("fedavg", "heterofl"), SETTINGS.keys() - {""})),
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name", "case"), some(dict.fromkeys([*QUICK, *sorted(SLOW)]), QUICK))
def test_rehearsal__a_round_waits_only_where_it_is_meant_to(pretended, name, backend, case, tmp_path):
    """... evaluation included, whatever the settings; from the third round on nothing is captured anew.

    FeMAM's levels, which begin in rounds 2 and 4, have waits and captures of their own.
    """
    rounds = {"graphs": 6 if name == "femam" else 3}.get(backend, 1 if name == "femam" else 2)
    history = seen_in_rounds(pretended, tmp_path, name, "--backend", backend, *SETTINGS[case], rounds=rounds)
    most = ANY + MORE.get(name, 0)
    for number, seen in enumerate(history, 1):
        if number == rounds or (number > 2 and (name, number) != ("femam", 4)):
            assert not seen.captures or case, number
            assert len(seen.waits) <= most, seen.waits


@pytest.mark.parametrize(
    ("name", "case"),
    some(
        [
            *product(ALGORITHMS, [""]),
            *product(["fedavg"], [what for what in SETTINGS if what not in ("", "fleet")]),
            ("fedfa", "fleet"),
        ],
        [*product(("clusamp", "femam", "fedfa"), [""]), ("fedavg", "privacy"), ("fedavg", "bulyan")],
    ),
)
def test_rehearsal__a_round_needs_no_float64_on_the_device(pretended_mps, name, case, tmp_path):
    for seen in seen_in_rounds(pretended_mps, tmp_path, name, "--backend", "loop", *SETTINGS[case], rounds=2):
        assert seen.launches


@pytest.mark.nightly
def test_rehearsal__captures_of_a_fleet_come_to_an_end(pretended):
    """Four architectures, other clients in each round: hardly more captures than the most of each that ever meet."""
    fed = fleet_federation(SPECS["cnn"], [(w, None) for w in (1.0, 0.75, 0.5, 0.25)] * 3, [4] * 12, torch.float32)
    models = {id(m): copy.deepcopy(m).to("cuda") for m in (kind.model for kind in fed.fleet.architectures)}
    there = on_gpu(fed, backend="graphs")
    most, captures = Counter(), []
    for number in range(1, 13):
        clients = torch.randperm(12, generator=torch.Generator().manual_seed(number))[:6].tolist()
        mine = [models[id(fed.fleet[client].model)] for client in clients]
        with pretended.watch() as seen:
            there.train([surgery.state(model) for model in mine], clients, Rng(0, number), models=mine)
        captures.append(seen.captures)
        most |= Counter(map(id, mine))
    assert sum(captures) <= 1.5 * sum(most.values())


@pytest.mark.parametrize("room", [0, 1, 2, 5])
def test_rehearsal__memory_for_a_few_graphs_trains_all_clients(make_federation, caplog, room):
    """What has no room waits for what has; the next round does not try again. The first capture warms up for all."""
    fed = make_federation("cnn", participants=4)
    made = []

    def capture(step, warm_up):
        if len(made) == room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made.append(warm_up)
        return step

    for number in (1, 2):
        starts = surgery.broadcast(fed.initial(), 4)
        group = fed.group(fed.model, starts, [2, 0, 3, 1], LocalObjective(), Rng(0, number))
        if not room:
            with pytest.raises(torch.OutOfMemoryError):
                graphs._side_by_side([group], [nullcontext()] * 4, capture)
            return
        (found,) = graphs._side_by_side([group], [nullcontext()] * 4, capture)
        (expected,) = train([group], "loop")
        assert_same(found, expected)
    assert made == [3, 1, 1, 1][:room]
    assert len(caplog.records) == (room < 4)


@pytest.mark.parametrize(
    ("precision", "backend"),
    some(
        product(("float32", "bf16"), ("loop", "vmap", "graphs")),
        [("float32", "loop"), ("bf16", "vmap"), ("float32", "graphs")],
    ),
)
def test_rehearsal__no_step_waits_for_the_device(pretended, make_federation, backend, precision):
    group = one_group(make_federation, precision)
    train([group], backend)
    with pretended.watch() as seen:
        train([group], backend)
    assert seen.waits == []
    assert seen.captures == 0
    steps, clients = sum(group[0].batches.steps), len(group[0].batches.steps)
    assert seen.launches >= (1 if backend == "vmap" else steps)
    if backend == "graphs":  # a step is one replay; beside it only what loads and saves a client
        assert seen.launches <= steps + 10 * clients


def assert_same(found, expected):
    assert torch.equal(found.loss, expected.loss)
    assert all(torch.equal(found.states[name], tensor) for name, tensor in expected.states.items())


def one_group(make_federation, precision="float32", objective=cross_entropy):
    """With all that may be in a step: crops, flips, momentum, clipping, several clients of different sizes."""
    fed = on_gpu(make_federation("cnn", optimizer=SGD(2**-4, 0.9, 2**-10, clip=1.0), augment=Augment(2, True)))
    fed = fed.with_local(precision=fed.local.precision._replace(name=precision))
    return fed.group(fed.model, surgery.broadcast(fed.initial(), 3), [2, 0, 3], LocalObjective(objective), Rng(0, 1))


def waiting(call, params, context, batch):
    """An objective that asks for a number in every step."""
    loss = cross_entropy(call, params, context, batch)
    return loss * (1 + 0 * params["fc2.bias"].detach().sum().item())


@pytest.mark.parametrize("backend", ["loop", "vmap", "graphs"])
def test_rehearsal__a_step_that_waits_is_noticed(pretended, make_federation, backend):
    group = one_group(make_federation, objective=waiting)
    if backend == "loop":
        with pretended.watch() as seen:
            train([group], backend)
        assert len(seen.waits) == sum(group[0].batches.steps)
    else:  # a graph cannot wait, and one program for all clients has no single number
        with fl_refused("unsupported", "--backend"):
            train([group], backend)


@pytest.mark.slow
def test_rehearsal__auto_comes_to_the_loop_and_leaves_nothing_captured(pretended, make_federation, monkeypatch, caplog):
    group = one_group(make_federation, objective=waiting)
    for name in ("vmap", "graphs", "graphs"):
        monkeypatch.setattr(admission, "choose", lambda *given, name=name: name)
        (found,) = train([group], "auto")
    assert_same(found, train([group], "loop")[0])
    assert [record.getMessage().split(": ")[1].split("since ")[1] for record in caplog.records] == [
        "vmap refuses",
        "graphs refuses",
    ]
    assert group[0].model not in graphs._KEPT


@pytest.mark.parametrize("backend", ["loop", "vmap", "graphs"])
def test_rehearsal__a_step_with_tensors_of_two_devices_is_noticed(pretended, make_federation, backend):
    weights = torch.ones(3)  # forgotten on the host

    def objective(call, params, context, batch):
        return cross_entropy(call, params, context, batch) + (params["fc2.bias"] * weights).sum()

    with pytest.raises(Forbidden, match="two devices"):
        train([one_group(make_federation, objective=objective)], backend)


@pytest.mark.slow
def test_rehearsal__clients_with_more_steps_than_a_window(pretended, make_federation, monkeypatch):
    """Of 6, 2 and 4 steps: less than a window, exactly one, and more."""
    group = one_group(make_federation)
    assert group[0].batches.steps == (6, 2, 4)
    (expected,) = train([group], "loop")
    for size in (4, 5, 256):
        monkeypatch.setattr(graphs, "_WINDOW", size)
        graphs._KEPT.clear()
        (found,) = train([group], "graphs")
        assert_same(found, expected)


@pytest.mark.nightly
def test_rehearsal__a_program_that_nobody_wants_any_more_goes_when_the_device_is_idle(pretended, make_federation):
    """The last four are kept."""
    job, *rest = one_group(make_federation)
    objectives = [lambda *given, k=k: k * cross_entropy(*given) for k in range(1, 6)]
    for objective in objectives:
        train([(dataclasses.replace(job, objective=objective), *rest)], "graphs")
    assert len(graphs._KEPT[job.model].programs) == 4

    def captures(k):
        with pretended.watch() as seen:
            train([(dataclasses.replace(job, objective=objectives[k]), *rest)], "graphs")
        assert any("_wait" in wait for wait in seen.waits) == bool(seen.captures)
        return seen.captures

    assert not captures(1)  # the oldest of the four, and now the newest
    assert captures(0)
    assert not captures(1)
    assert captures(2)


@pytest.mark.parametrize("backend", ["loop", "vmap", "graphs"])
def test_rehearsal__attention_in_one_program_is_plain_products(pretended, backend):
    """Fused kernels do not see within vmap that a backward pass will come."""
    fed = fleet_federation(SPECS["transformer"], [(1.0, 3)] * 4, dtype=torch.float32)
    fed = on_gpu(dataclasses.replace(fed, fleet=None))
    group = fed.group(fed.model, surgery.broadcast(fed.initial(), 2), [0, 1], LocalObjective(), Rng(0, 1))
    with pretended.watch() as seen:
        train([group], backend)
    assert any("scaled_dot_product" in name for name in seen.operations) == (backend != "vmap")


@pytest.mark.slow
def test_rehearsal__a_graph_keeps_the_data_that_it_was_captured_with_and_no_others(pretended, make_federation):
    """Others could come to lie at the same address, which is what they are known by. What stands beside the samples is
    large, and FeMAM has another table for each of its levels.
    """
    (job, *rest), objective, former = one_group(make_federation), with_logits(cross_entropy), []
    for number in range(3):
        data = dataclasses.replace(job.data, y=(job.data.y + number) % 3)
        table = torch.zeros(len(data.y), 3).to("cuda")
        group = (dataclasses.replace(job, data=data, per_sample=table, objective=objective), *rest)
        assert_same(*(train([group], backend)[0] for backend in ("graphs", "loop")))
        kept = weakref.ref(data), weakref.ref(table)
        del data, table, group
        assert all(one() is not None for one in kept)
        assert not any(one() is not None for one in former)
        former.append(kept[1])


def test_rehearsal__what_a_trial_measures_on_the_device(pretended, make_federation):
    """As in the process of a candidate: with the device's own clock, and the samples of a few steps alone."""
    few = trial.first_steps([one_group(make_federation)])
    found = trial.measure(BACKENDS["graphs"], few)
    assert found["distance"] < 1e-4
    assert found["repeats"]
    assert min(found["seconds"]) > 0


def test_rehearsal__a_device_that_cannot_compute_is_refused_before_anything_is_made(pretended, monkeypatch):
    def ones(*given, **named):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\n(and more)")

    assert str(pick_device("auto")) == "cuda"
    monkeypatch.setattr(torch, "ones", ones)
    with fl_refused("unsupported", "'cuda'", "--device"):
        pick_device("auto")


def test_rehearsal__copies_that_do_not_wait_are_for_cuda_alone(make_federation, monkeypatch):
    """Another device may read the host's memory when it already holds something else."""
    asked, to = [], torch.Tensor.to

    def seen(tensor, *given, **named):
        asked.append(named.get("non_blocking", False) or True in given[2:])
        return to(tensor, *given, **named)

    monkeypatch.setattr(torch.Tensor, "to", seen)
    fed = make_federation("cnn")
    fed.initial(torch.Generator().manual_seed(1))
    train([fed.group(fed.model, surgery.broadcast(fed.initial(), 2), [0, 2], LocalObjective(), Rng(0, 1))], "vmap")
    assert asked
    assert not any(asked)


@pytest.mark.usefixtures("pretended")
def test_rehearsal__candidates_are_the_backends_that_the_device_has_and_samples_allow(make_federation, monkeypatch):
    offered = []
    monkeypatch.setattr(admission, "choose", lambda groups, candidates, *_: offered.append([*candidates]) or "loop")
    job, *rest = one_group(make_federation)
    in_layout = dataclasses.replace(job, precision=job.precision._replace(channels_last=True))
    train([(job, *rest)])
    train([(job, *rest)], moving=True)
    train([(in_layout, *rest)])
    train([(job, *rest)] * 2)
    assert offered == [["vmap", "graphs"], ["vmap"], ["graphs"], ["graphs"]]
    norms = nn.Sequential(
        nn.Flatten(0), nn.Unflatten(0, (-1, 1, 8, 8)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3)
    )
    normed = on_gpu(make_federation(norms))
    normed = normed.with_local(precision=normed.local.precision._replace(channels_last=True))
    start = surgery.broadcast(normed.initial(), 2)
    train([normed.group(normed.model, start, [0, 2], LocalObjective(cross_entropy), Rng(0, 1))])
    assert len(offered) == 4  # batch norm for channels last may hang on several streams: nothing is left to try


def test_rehearsal__full_memory_in_an_admitted_backend_leaves_the_loop(pretended, make_federation, monkeypatch):
    group = one_group(make_federation)
    (expected,) = train([group], "loop")

    def full(groups):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(BACKENDS, "vmap", full)
    monkeypatch.setattr(admission, "choose", lambda *given: "vmap")
    assert_same(train([group])[0], expected)
    with pytest.raises(torch.OutOfMemoryError):
        train([group], "vmap")


@pytest.mark.slow
def test_rehearsal__objectives_made_anew_in_every_round_are_told(pretended, make_federation, caplog, monkeypatch):
    monkeypatch.setattr(graphs, "_PROGRAMS", 1)
    monkeypatch.setattr(graphs, "_TOO_MANY", 4)
    job, *rest = one_group(make_federation)
    for _ in range(6):
        train([(dataclasses.replace(job, objective=lambda *given: cross_entropy(*given)), *rest)], "graphs")
    (record,) = caplog.records
    assert "captured as a graph over and over" in record.getMessage()
    assert graphs.is_in_vain([job.model])
    monkeypatch.setattr(admission, "choose", lambda *given: "graphs")
    monkeypatch.delitem(BACKENDS, "graphs")
    train([(job, *rest)], "auto")  # by the loop from then on


@pytest.mark.parametrize("case", some(CASES, ["lenet, clipped"]))
def test_rehearsal__launches_and_waits_do_not_creep_up(pretended, case):
    """Those of the stored table are the ceiling; `python benchmarks/launches.py` makes it anew."""
    stored = {row["case"]: row for row in json.loads(STORED.read_text())["rows"]}[case]
    for backend, counts in measure(case, pretended).items():
        for what, number in counts.items():
            assert number <= 1.02 * stored[backend][what], (backend, what)
