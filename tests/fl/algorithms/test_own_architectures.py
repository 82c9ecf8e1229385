"""Clients with models of any architectures: Local, FedProto and FedMD, which send no weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from refusals import fl_refused
from rounds import play
from selection import some
from torch import nn

import fl
from fl.algorithms import ALGORITHMS
from fl.algorithms.fedmd import METHOD as fedmd
from fl.algorithms.fedmd import FedMDOptions, share_out
from fl.base.rng import Rng, draw
from fl.engine import SGD
from fl.engine.batches import make_batches
from fl.models.fleet import ClientArchitecture, Fleet, identity_plan

ABLE = ("local", "fedproto", "fedmd")
FEW = {"samples": 200, "clients": 5, "participants": 3, "rounds": 2, "partition": "iid", "local_epochs": 1}
FEW |= {"local_test": 0.2, "batch_size": 20}


def mlp(hidden=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def cnn():
    conv = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 8))
    return nn.Sequential(conv, nn.ReLU(), nn.Linear(8, 10))


def config(algorithm, **more):
    return fl.Config.of(algorithm=algorithm, **FEW | more)


def predictions(algorithm, server, fed):
    return [algorithm.predict(server, fed.data.test_x[:20], client) for client in range(len(fed.clients))]


@pytest.mark.parametrize("algorithm", ABLE)
def test_own_architectures__two_copies_of_a_model_are_one_model(algorithm):
    """The same rounds whether the clients' models are one architecture, or two of the same kind and weights."""
    net = cnn()
    made = [fl.build(config(algorithm), model=model) for model in (net, [net, copy.deepcopy(net)])]
    assert [len(fed.fleet_or_uniform.architectures) for fed, _ in made] == [1, 2]
    (one, first), (two, second) = ((play(method, fed, rounds=2)[-1]) for fed, method in made)
    assert first.metrics == second.metrics
    torch.testing.assert_close(first.loss, second.loss)
    for (fed, method), server in zip(made, (one, two)):
        made[0 if server is one else 1] = predictions(method, server, fed)
    for before, after in zip(*made):
        torch.testing.assert_close(before, after, atol=1e-4, rtol=1e-4)


def test_own_architectures__in_local_each_learns_what_it_would_beside_clients_like_itself():
    nets = [cnn(), mlp()]
    fed, method = fl.build(config("local"), model=nets)
    assert fed.fleet.owned == (0, 1, 0, 1, 0)
    server, _ = play(method, fed, rounds=2)[-1]
    mixed = predictions(method, server, fed)
    for k, net in enumerate(nets):
        fed, method = fl.build(config("local"), model=net)
        server, _ = play(method, fed, rounds=2)[-1]
        for client, expected in enumerate(predictions(method, server, fed)):
            if client % 2 == k:
                torch.testing.assert_close(mixed[client], expected, atol=1e-4, rtol=1e-4)


def test_fedproto__draws_architectures_to_common_prototypes():
    def apart(lam):
        fed, method = fl.build(config("fedproto", fedproto={"lam": lam}, participants=5), model=nets)
        _, update = play(method, fed, rounds=4)[-1]
        assert set(update.received) == {"means", "counts"}
        means = update.received["means"]
        return (means - means.mean(0)).square().mean().item()

    nets = [cnn(), mlp()]
    assert apart(10.0) < 0.5 * apart(0.0)


def test_own_architectures__a_function_of_the_clients_number_makes_the_models():
    fed, method = fl.build(config("local"), model=lambda client: mlp(4 + client // 2))
    assert fed.fleet.owned == (0, 0, 1, 1, 2)
    _, update = play(method, fed, rounds=1)[-1]
    for client, state in zip(fed.sample(Rng(0, 1)), update.states):
        assert len(state["1.weight"]) == 4 + client // 2
    alike, _ = fl.build(config("fedavg"), model=lambda client: mlp())
    assert alike.fleet is None


def test_own_architectures__models_are_found_by_their_import_path(monkeypatch, tmp_path):
    (tmp_path / "several_models.py").write_text(
        "from torch import nn\n\n\ndef net(client):\n    hidden = 4 + client % 2\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.Linear(hidden, 10))\n\n\n"
        "nets = [net(0), net(1), net(0)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, owned in (("net", (0, 1, 0, 1, 0)), ("nets", (0, 1, 2, 0, 1))):
        fed, _ = fl.build(config("local", model=f"several_models:{name}"))
        assert fed.fleet.owned == owned
        with fl_refused("unsupported", "--algorithm"):
            fl.build(config("fedavg", model=f"several_models:{name}"))


@pytest.mark.parametrize("algorithm", some(ABLE, ["fedproto"]))
def test_own_architectures__a_run_is_resumed_exported_and_loaded(algorithm, tmp_path):
    nets = [cnn(), mlp()]
    settings = config(algorithm)
    fl.simulate(settings, tmp_path / "whole", model=nets)
    fl.simulate(settings, tmp_path / "parts", model=nets, on_round=lambda row: row["round"] == 1)
    fl.simulate(settings, tmp_path / "parts", model=nets, resume=True)
    one, other = ((tmp_path / name / "checkpoint.safetensors").read_bytes() for name in ("whole", "parts"))
    assert one == other
    assert isinstance(fl.load_model(tmp_path / "whole", model=nets)[0], nn.Sequential)
    fl.export_model(tmp_path / "whole", tmp_path / "one.pt", model=nets, client=1)
    assert torch.load(tmp_path / "one.pt")["1.weight"].shape == (8, 64)
    data = settings.load()
    new = fl.Dataset.from_arrays(data.x[:9], data.y[:9], data.test_x, data.test_y, [0, 1, 2] * 3, classes=10)
    for net in nets:
        found = fl.personalize(tmp_path / "whole", new, epochs=1, model=net)
        assert found.model(2).state_dict().keys() == net.state_dict().keys()
    for unclear in (None, nets, mlp(5)):
        with pytest.raises(fl.FLError):
            fl.personalize(tmp_path / "whole", new, model=unclear)
    for wrong in ([cnn(), mlp(5)], [cnn()], cnn(), [mlp(), cnn()]):
        with pytest.raises(fl.FLError):
            fl.simulate(settings.replace(rounds=3), tmp_path / "parts", model=wrong, resume=True)


def test_own_architectures__ranks_of_adapters_may_differ():
    adapters = fl.AdapterOptions("lora", ranks=(1, 3))
    fed, method = fl.build(config("local", adapters=adapters, model="cnn", width=0.1))
    _, update = play(method, fed, rounds=1)[-1]
    ranks = {client: len(next(iter(s.values()))) for client, s in zip(fed.sample(Rng(0, 1)), update.states)}
    assert ranks == {client: (1, 3)[client % 2] for client in ranks}


@pytest.mark.parametrize("algorithm", some([n for n in ALGORITHMS if n not in ABLE], ("fedavg", "ditto", "fedfa")))
def test_own_architectures__methods_that_send_weights_refuse(algorithm):
    with pytest.raises(fl.FLError, match=f"{algorithm} .*"):
        fl.build(config(algorithm), model=[cnn(), mlp()])


def test_own_architectures__what_is_refused():
    for model, settings, said in (
        ([], {}, "empty"),
        ([mlp()] * 6, {}, "6 models for 5 clients"),
        ([mlp(), 3], {}, "int"),
        ([mlp(), nn.Linear(3, 3)], {}, "does not take samples"),
        ([cnn(), mlp(5)], {"algorithm": "fedproto"}, "8 and 5|5 and 8"),
        ([mlp(), cnn()], {"init": "timm"}, "--init"),
    ):
        with pytest.raises(fl.FLError, match=said):
            fl.build(config(**{"algorithm": "local", **settings}), model=model)


def test_own_architectures__architectures_of_a_federation_made_by_hand():
    """Whether they have plans within the global model does not matter to these methods."""
    base, _ = fl.build(config("fedavg"))
    nets = [cnn(), mlp()]
    for plans in ([None, None], [identity_plan(net) for net in nets]):
        fleet = Fleet(tuple(map(ClientArchitecture, nets, plans)), (0, 1, 1, 0, 1))
        fed = fl.Federation(nets[0], base.data, base.clients, 3, base.local, fleet=fleet)
        for name in ABLE:
            play(ALGORITHMS[name](fed), fed, rounds=1)
        with pytest.raises(fl.FLError):
            ALGORITHMS["ditto"](fed)


NET = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def learn(fed, model, rows_of_steps, loss):
    """Steps of torch.optim on batches of samples."""
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.05, momentum=0.9)
    for rows in rows_of_steps:
        optimizer.zero_grad()
        loss(model(fed.data.normalise(fed.data.x[rows], torch.float64)), rows).backward()
        optimizer.step()


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_fedmd__is_the_papers_algorithm(make_federation, backend):
    """Three rounds of digest, revisit and communicate, step by step."""
    settings = {"dtype": torch.float64, "participants": 2, "optimizer": SGD(0.05, 0.9), "sizes": (30, 40, 25, 35)}
    fed = make_federation(copy.deepcopy(NET), backend=backend, **settings)
    algorithm = fedmd(fed, FedMDOptions(public=0.2, samples=15, epochs=2))
    public, rest = share_out(fed, 0.2)
    own, server, consensus = [copy.deepcopy(fed.model) for _ in range(4)], algorithm.init(), None
    size = fed.local.batch_size

    def asked(number):
        return public[draw(len(public), 15, Rng(0, number).torch("public"))]

    for number, clients in enumerate(([0, 1], [3, 0], [1, 2]), 1):
        said = []
        for i in clients:
            if consensus is not None:
                everything, rng = torch.arange(15), Rng(0, number).apart("digest")
                steps = make_batches([everything], [i], 2, min(size, 15), rng, "cpu").index[0]
                rows_of, index = asked(number), {int(row): k for k, row in enumerate(asked(number))}

                def distance(out, rows, index=index):
                    return (out - consensus[[index[int(row)] for row in rows]]).abs().mean()  # noqa: B023

                learn(fed, own[i], [rows_of[rows] for rows in steps], distance)
            each = make_batches(
                [rest.train[i]], [i], fed.local.epochs, min(size, rest.train.largest), Rng(0, number), "cpu"
            )
            learn(fed, own[i], each.index[0], lambda out, rows: F.cross_entropy(out, fed.data.y[rows]))
            with torch.no_grad():
                x = fed.data.normalise(fed.data.x[asked(number + 1)], torch.float64)
                said.append(own[i].eval()(x))
        consensus = sum(said) / 2
        server, update = algorithm.round(server, clients, Rng(0, number))
        torch.testing.assert_close(server["consensus"]["logits"], consensus)
        for i in range(4):
            for name, tensor in own[i].state_dict().items():
                torch.testing.assert_close(server["clients"][name][i], tensor)
        assert update.metrics["bytes_up"] == update.metrics["bytes_down"] == (15 * 3 + 1) * 8


def test_own_architectures__nobody_trains_on_public_samples_and_their_labels_do_not_matter():
    fed, method = fl.build(config("fedmd"), model=mlp)
    public, rest = share_out(fed, 0.1)
    assert len(public) == round(0.1 * len(fed.clients.train.samples))
    everything = torch.cat([public, rest.train.samples]).sort().values
    assert torch.equal(everything, fed.clients.train.samples.sort().values)
    assert torch.equal(rest.test.samples, fed.clients.test.samples)
    fed.data.y[public] = (fed.data.y[public] + 1) % 10
    changed, _ = play(method, fed, rounds=2)[-1]
    again, method = fl.build(config("fedmd"), model=mlp)
    server, _ = play(method, again, rounds=2)[-1]
    for name, tensor in server["global"].items():
        assert torch.equal(tensor, changed["global"][name])


def test_own_architectures__a_consensus_that_is_older_goes_with_its_own_samples():
    """If nobody's logits arrive, those of the round before stay, for the samples that they were given to."""
    _, method = fl.build(config("fedmd", fedmd={"public": 0.5, "samples": 10}), model=mlp)
    server = method.init()
    server, _ = method.round(server, [0, 1], Rng(0, 1))
    assert int(server["consensus"]["round"]) == 2
    _, late = method.round(server, [0, 1], Rng(0, 5))
    assert late.loss.isfinite().all()


@pytest.mark.parametrize("share", [1e-6, 0.999])
def test_own_architectures__a_share_that_leaves_nothing_is_refused(share):
    with fl_refused("argument", "--fedmd"):
        fl.build(config("fedmd", fedmd={"public": share}))
