"""What every method owes, whoever wrote it: checked on few trainings of each, through public calls alone.

Two trainings serve most of it. In one a small module of one's own, whose first layer is frozen, is trained on a table,
round by round from Python. The other is a run by names, with everything asked for that the method does not refuse:
clients that come and go or are malicious, another rule of the server, another precision.
"""

import copy
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from ranks import NEED_ADAPTERS, NEED_EXITS, ran, tiny
from refusals import fl_refused
from safetensors.torch import load_file
from selection import METHODS, in_turn, some
from torch import nn

import fl
from fl import AttackOptions, Compression, Defence, FLError, Rng
from fl.algorithms import ALGORITHMS
from fl.extensions.presence import PresenceOptions
from fl.federation.client_models import predict_all


@pytest.fixture(scope="module", params=some(ALGORITHMS, METHODS))
def name(request):
    """Of a method. All tests of one run together, so that they share its trainings."""
    return request.param


FEW = METHODS[:3]
"""Methods by which one feature is tested that is the same for all."""
every_other = pytest.mark.parametrize("name", some(ALGORITHMS, METHODS[::2]), scope="module")
"""Marks a test of every method of which half as many cases run by default."""
ASKED = [
    {"masked_loss": True},
    {"presence": PresenceOptions(joining=0.2, leaving=0.2)},
    {"attack": AttackOptions(share=0.4, amplify=3.0), "defence": Defence("median", clip=1.0)},
]
"""Settings that not every method can do."""


def lacks(name, **changes):
    """Whether a method cannot do what settings ask for."""
    return bool(fl.Config.of(**changes).asks().keys() & ALGORITHMS[name].all_lacks)


FROZEN = {"first.weight", "first.bias"}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.outer(self.dropout(self.norm(self.inner(x)).relu()))


class Net(nn.Module):
    """It can be made narrower and shallower, and its first layer is frozen. With exits it classifies twice."""

    def __init__(self, exits=False):
        super().__init__()
        self.exits = exits
        self.first = nn.Linear(64, 12).requires_grad_(False)
        self.blocks = nn.Sequential(Block(12), Block(12))
        self.last = nn.Linear(12, 10)
        if exits:
            self.early = nn.Linear(12, 10)

    def forward(self, x):
        x = self.first(x).relu()
        logits = self.last(self.blocks(x))
        if not self.exits:
            return logits
        exits = torch.stack([self.early(x), logits], 1)
        return exits if self.training else exits.mean(1)


HUGE = 1e38


@cache
def table(*huge):
    """Digits as rows of numbers, some of them so large that nobody can train on them."""
    digits = fl.data.load("digits")
    x, test_x = (part.flatten(1).float() / 16 for part in (digits.x[:240], digits.test_x))
    x[list(huge)] = HUGE
    return fl.Dataset.from_arrays(x, digits.y[:240], test_x, digits.test_y)


@cache
def module(exits):
    torch.manual_seed(0)
    return Net(exits)


def net(name):
    """One module for all methods but those that need exits, which nothing changes."""
    return module(name in NEED_EXITS)


def settings(name, **changes):
    """Of six clients, three of whom take part in a round."""
    few = {"rounds": 3, "participants": 3, "local_valid": 0.2, "local_test": 0.2, "batch_size": 16}
    own = {
        "fltrust": {"root": 20},  # no sample that nobody can train on is among them
        "pfedme": {"inner_steps": 2},
        "femam": {"start": "global"},  # as one module has to, not at random
    }.get(name)
    config = tiny(name, **{**few, **changes})
    return config.replace(**{name: replace(config.method.options, **own)}) if own else config


def built(name, data=None, **changes):
    """(federation, algorithm) for the module."""
    return fl.build(
        settings(name, **changes).replace(model="given", width=(1.0,), exits=False, samples=0),
        data or table(),
        net(name),
    )


class Round(NamedTuple):
    clients: list
    server: dict
    trained: NamedTuple
    copy: dict


def play(fed, algorithm, rounds=3):
    """The rounds, the first of them before all training. Each holds the server twice: as it was returned, and a copy
    made at once.
    """
    server = algorithm.init()
    history = [Round([], server, None, copy.deepcopy(server))]
    for number in range(1, rounds + 1):
        rng = Rng(0, number)
        clients = algorithm.choose(server, rng)
        server, trained = algorithm.round(server, clients, rng)
        history.append(Round(clients, server, trained, copy.deepcopy(server)))
    return history


@cache
def played(name):
    """(federation, algorithm, rounds) in the backend that is the simplest."""
    fed, algorithm = built(name)
    return fed, algorithm, play(fed, algorithm)


def tensors(server):
    """((part, name), tensor) of all that a server keeps."""
    return {(part, name): tensor for part, state in server.items() for name, tensor in state.items()}


def differing(server, other):
    """What of a server is not, bit for bit, the same in another one."""
    one, two = tensors(server), tensors(other)
    assert one.keys() == two.keys()
    return [place for place, tensor in one.items() if not torch.equal(tensor, two[place])]


def models_of_clients(fed, algorithm, server, samples, owners):
    """The logits of samples by their owners' models, all clients at once."""
    return predict_all(fed, algorithm.client_models(server), samples, owners)


def moves(name, part):
    """Whether a part of the server holds no models, but changes of models or gradients, under the same names."""
    of_clients = part == "clients" and name in ("scaffold", "feddyn")
    return of_clients or part in ("gradients", "momentum", "variance", "velocity", "control", "h")


def test_contract__every_model_begins_with_the_module_and_what_is_frozen_stays(name):
    fed, _, history = played(name)
    start = fed.initial()
    assert {key for key, parameter in fed.model.named_parameters() if not parameter.requires_grad} == (
        {key for key in start if "base_layer" in key} if name in NEED_ADAPTERS else FROZEN  # constants, but for flora
    )
    for number, round in enumerate(history):
        for (part, key), tensor in tensors(round.server).items():
            if key in start and not moves(name, part) and (key in FROZEN or number == 0):
                assert torch.equal(tensor, start[key].expand_as(tensor)), f"{part} {key} after round {number}"
    assert len({key for part, key in differing(history[0].server, history[-1].server)} & start.keys()) >= 2
    assert all(torch.equal(start[key], tensor) for key, tensor in net(name).state_dict().items() if key in start)


def test_contract__the_global_model_is_deployed_and_clients_predict_with_their_own(name):
    """After the first round, when some have never taken part, and after the last."""
    fed, algorithm, history = played(name)
    x, parts = fed.data.test_x, fed.clients.test
    owners = torch.arange(len(parts)).repeat_interleave(parts.sizes)
    for round in (history[1], history[-1]):
        assert torch.equal(algorithm.predict(round.server, x, None), fed.predict(round.server["global"], x))
        found = models_of_clients(fed, algorithm, round.server, parts.samples, owners)
        each = [algorithm.predict(round.server, fed.data.x[part], client) for client, part in enumerate(parts)]
        torch.testing.assert_close(found.float(), torch.cat(each), rtol=1e-4, atol=1e-5)


def test_contract__a_round_is_a_function_of_its_arguments_and_changes_none(name):
    _, algorithm, history = played(name)
    *_, before, last = history
    again, trained = built(name)[1].round(before.server, last.clients, Rng(0, 3))
    assert not differing(again, last.server)
    assert trained.sizes == last.trained.sizes
    other, _ = algorithm.round(before.server, last.clients, Rng(0, 4))
    assert differing(other, last.server)
    for round in history:
        assert not differing(round.server, round.copy)


def with_one_of(*changes, default=METHODS):
    """Marks a test of every method with one of these settings, in turn."""
    return pytest.mark.parametrize(("name", "changes"), in_turn(ALGORITHMS, changes, default), scope="module")


VMAP, WORKERS = {"backend": "vmap", "max_parallel_clients": 2}, {"backend": "workers"}
BACKENDS = [(name, how) for how in (VMAP, WORKERS) for name in ALGORITHMS]
DEFAULT = [(name, VMAP) for name in METHODS] + [(name, WORKERS) for name in FEW]  # `workers` is `loop` in threads


@pytest.mark.parametrize(("name", "changes"), some(BACKENDS, DEFAULT), scope="module")
def test_contract__backends_agree(name, changes):
    """After two rounds, so that what a method keeps has come to matter; in chunks of two clients and of one."""
    expected = tensors(played(name)[2][2].server)
    found = tensors(play(*built(name, **changes), rounds=2)[-1].server)
    assert found.keys() == expected.keys()
    for place, tensor in expected.items():
        # Adam, which trains FedGen's generator, makes steps of full length also of gradients that are mere rounding.
        atol = 1e-3 if place[0].startswith("generator") else 1e-5
        torch.testing.assert_close(
            found[place], tensor, rtol=1e-4, atol=atol, msg=lambda text, at=place: f"{at} {text}"
        )


@every_other
def test_contract__a_client_that_diverges_is_dropped_and_the_others_go_on(name):
    fed, _, honest = played(name)
    bad = honest[1].clients[0]
    history = play(*built(name, data=table(int(fed.clients.train[bad][0]))), rounds=2)
    for round in history[1:]:
        assert [size == 0 for size in round.trained.sizes] == [client == bad for client in round.clients]
        assert all(tensor.isfinite().all() for tensor in tensors(round.server).values())
        assert {key for _, key in differing(history[0].server, round.server)} & fed.initial().keys()
    assert bad in history[1].clients


@with_one_of({"participants": 1}, {"participants": 6}, default=METHODS[::2])
def test_contract__a_single_client_can_take_part_and_all_of_them(name, changes):
    fed, algorithm = built(name, **changes)
    history = play(fed, algorithm, rounds=2)
    for round in history[1:]:
        assert round.trained.metrics["bytes_down"] >= round.trained.metrics["bytes_up"] >= 0
        assert all(tensor.isfinite().all() for tensor in tensors(round.server).values())
    assert {key for _, key in differing(history[0].server, history[-1].server)} & fed.initial().keys()


KRUM, CLIP = {"defence": Defence("krum", malicious=0)}, {"defence": Defence(clip=0.01)}
TAMPERED = [{"defence": Defence("median")}, KRUM, CLIP, {"attack": AttackOptions(share=0.5, amplify=20.0)}]
AND_ACCEPTED = [  # by the methods whose turn is one that they refuse
    pytest.param(name, CLIP, marks=pytest.mark.slow)
    for name, changes in (case.values for case in in_turn(ALGORITHMS, TAMPERED, METHODS[:4]))
    if lacks(name, **changes) and not lacks(name, **TAMPERED[0])
]


@pytest.mark.parametrize(
    ("name", "changes"), [*in_turn(ALGORITHMS, TAMPERED, METHODS[:4]), ("femam", KRUM), *AND_ACCEPTED], scope="module"
)
def test_contract__attacks_and_defences_reach_what_is_sent(name, changes):
    if lacks(name, **changes):
        with pytest.raises(FLError, match=f"{name} .*: leave"):
            built(name, **changes)
        return
    server = play(*built(name, **changes), rounds=1)[-1].server
    assert all(tensor.isfinite().all() for tensor in tensors(server).values())
    changed = {key for part, key in differing(played(name)[2][1].server, server) if part == "global"}
    assert changed
    assert not changed & FROZEN


@with_one_of(
    {"compression": Compression("topk", share=0.1)}, {"compression": Compression("quantise", bits=4)}, default=FEW
)
def test_contract__compression_reaches_what_is_sent_and_its_traffic(name, changes):
    refused = lacks(name, **changes)
    feedback = not refused and not lacks(name, compression=replace(changes["compression"], feedback=True))
    compression = replace(changes["compression"], feedback=feedback)
    for wrong in [compression] * refused + [replace(compression, feedback=True)] * (not feedback):
        with pytest.raises(FLError, match=f"{name} .*: leave --compression"):
            built(name, compression=wrong)
    if refused:
        return
    fed, algorithm = built(name, compression=compression)
    history = play(fed, algorithm, rounds=2)
    for round, plain in zip(history[1:], played(name)[2][1:]):
        assert 0 < round.trained.metrics["bytes_up"] < plain.trained.metrics["bytes_up"]
    server = history[-1].server
    assert all(tensor.isfinite().all() for tensor in tensors(server).values())
    assert any(key.startswith("unsent.") for key in server.get("clients", {})) == feedback
    changed = {key for part, key in differing(history[0].server, server) if part == "global"}
    assert changed
    assert not changed & FROZEN


@every_other
def test_contract__a_module_will_do_by_default_or_is_refused_with_the_reason(name):
    config, begun = fl.Config.of(algorithm=name, samples=0, local_valid=0.2), None
    if name in NEED_ADAPTERS:
        with pytest.raises(FLError, match="--adapters"):
            fl.build(config, table(), net(name))
        config = config.replace(adapters=NEED_ADAPTERS[name])
    with suppress(FLError):
        fed, algorithm = fl.build(config, table(), net(name))
        begun = algorithm.init()
    if begun is None:
        with fl_refused("argument", "--femam.start"):  # which makes several models with different weights
            fl.build(config, table(), net(name))[1].init()
        fed, algorithm = fl.build(config, table(), lambda: Net(name in NEED_EXITS))
        begun = algorithm.init()
    assert algorithm.predict(begun, fed.data.test_x, None).shape == (len(fed.data.test_x), 10)


# Runs by names.


def asking(name, **changes):
    """Settings that ask for all that the method does not refuse."""
    for more in ASKED:
        changes |= {} if lacks(name, **more) else more
    return settings(name, precision="bf16", rounds=2, **changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """name -> (folder, summary) of a whole run, made once."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def simulated(name):
        torch.set_num_threads(1)
        return folder / name, fl.simulate(asking(name), folder / name)

    return simulated


def assert_same_runs(one, other):
    """The tables but for the seconds, and all that the servers keep."""
    tables = [
        [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()] for folder in (one, other)
    ]
    seconds = {index for index, title in enumerate(tables[0][0]) if "seconds" in title}
    assert seconds
    rows, more = ([[cell for k, cell in enumerate(row) if k not in seconds] for row in table] for table in tables)
    assert rows == more
    server, another = (load_file(folder / "checkpoint.safetensors") for folder in (one, other))
    assert server.keys() == another.keys()
    assert all(torch.equal(tensor, another[key]) for key, tensor in server.items())


def test_contract__a_run_leaves_the_model_that_it_scored(name, run):
    folder, summary = run(name)
    data = fl.Config.read(folder).load()
    with torch.no_grad():
        logits = fl.load_model(folder)(data.normalise(data.test_x))
    accuracy = (logits.argmax(1) == data.test_y).double().mean().item()
    assert accuracy == pytest.approx(summary["final"]["accuracy"], abs=0.01)


def test_simulate__a_run_is_resumed_bit_for_bit(name, run, tmp_path):
    fl.simulate(asking(name), tmp_path / name, on_round=lambda row: row["round"] == 1)
    fl.simulate(asking(name), tmp_path / name, resume=True)
    assert_same_runs(run(name)[0], tmp_path / name)


def simulate_all(rank, folder, names):
    for name in names:
        fl.simulate(asking(name), folder / name)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_contract__ranks_agree(part, run, tmp_path):
    size, names = (2, 3)[part % 2], [*ALGORITHMS][part::6]
    assert ran(size, simulate_all, tmp_path, names) == [0] * size
    for name in names:
        assert_same_runs(run(name)[0], tmp_path / name)
