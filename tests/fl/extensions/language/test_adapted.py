"""Adapters of low rank in place of models: training, rounds, run folders, and the methods made for them."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from refusals import fl_refused
from rounds import assert_same, made, play
from selection import METHODS, some
from torch import nn

import fl
import surgery
from fl.algorithms import ALGORITHMS
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine import SGD
from fl.engine.constants import constants
from fl.extensions.language.adapters import AdapterOptions, add_adapters, fleet_of_ranks, fold_adapters
from fl.federation.cohort import per_client
from fl.runs import checkpoint
from fl.runs.metrics import read
from surgery import adapters
from surgery.files import open_state


def base():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()


@pytest.fixture
def federation_of(make_federation):
    """Four clients on a frozen network in float64, whose classifier is trained whole."""

    def make(options=AdapterOptions("lora", rank=2, train=("6",)), net=None, base_changes=False, **settings):
        net = base() if net is None else net
        create = partial(add_adapters, net, options, base_changes=base_changes)
        seed = torch.Generator().manual_seed
        model = create(seed(1))
        fleet = fleet_of_ranks(lambda rank: create(seed(1), rank), options.ranks, 4, model) if options.ranks else None
        settings = {"optimizer": SGD(0.2), "dtype": torch.float64, "create": create, **settings}
        return make_federation(model, fleet=fleet, **settings)

    return make


RANKS = AdapterOptions("lora", ranks=(1, 3, 2), train=("6",))
LEARNT = [
    "0.lora_A.weight", "0.lora_B.weight", "4.lora_A.weight", "4.lora_B.weight", "6.weight", "6.bias",
]  # fmt: skip


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_adapted__clients_train_dora_alike_in_all_backends(federation_of, backend):
    options = AdapterOptions("dora", rank=2, train=("6",))
    servers = []
    for one in ("loop", backend):
        fed = federation_of(options, backend=one)
        servers.append(play(ALGORITHMS["fedavg"](fed), fed, rounds=2)[-1][0]["global"])
    for name, tensor in servers[0].items():
        torch.testing.assert_close(servers[1][name], tensor, rtol=0, atol=1e-12)
    assert not torch.allclose(servers[0]["4.lora_magnitude_vector"], fed.initial()["4.lora_magnitude_vector"])


@pytest.mark.parametrize("backend", ["loop", "workers", "vmap"])
def test_adapted__clients_train_their_adapters_as_torch_does_on_a_copy(federation_of, backend):
    net = base()
    fed = federation_of(net=net, backend=backend, epochs=1)
    before = {id(tensor): tensor.clone() for tensor in constants(fed.model).values()}
    assert len(before) == 6  # weight and bias of two layers and of the norm
    starts = surgery.broadcast(fed.initial(), 3)
    assert [name for name in starts if "lora" in name or name.startswith("6")] == LEARNT
    found = fed.train(starts, [0, 2, 1], Rng(0, 1)).states
    whole = adapters.add(net, 2, train=("6",), scale=2.0)  # the same network, with parameters that are frozen
    other = replace(federation_of(backend="loop", epochs=1), model=whole)
    starts = surgery.broadcast({**surgery.state(whole), **fed.initial()}, 3)
    expected = other.train(starts, [0, 2, 1], Rng(0, 1)).states
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12)
    assert not torch.equal(found["0.lora_B.weight"][0], found["0.lora_B.weight"][1])
    assert all(torch.equal(tensor, before[id(tensor)]) for tensor in constants(fed.model).values())


def test_adapted__the_base_is_there_once(federation_of):
    fed = federation_of()
    shared = {tensor.data_ptr() for tensor in constants(fed.model).values()}
    copied = copy.deepcopy(fed.model, constants(fed.model))
    assert {tensor.data_ptr() for tensor in constants(copied).values()} == shared
    every = federation_of(RANKS).fleet.architectures
    assert [adapters.rank_of(surgery.state(kind.model)) for kind in every] == [{"0": r, "4": r} for r in (1, 3, 2)]
    assert len({tensor.data_ptr() for kind in every for tensor in constants(kind.model).values()}) == len(shared)


def test_adapted__a_stranger_gets_a_plain_model(federation_of):
    fed = federation_of()
    algorithm = ALGORITHMS["fedavg"](fed)
    server = play(algorithm, fed, rounds=2)[-1][0]
    model = copy.deepcopy(fed.model)
    model.load_state_dict(server["global"])
    plain = fold_adapters(model.eval())
    assert not constants(plain)
    assert list(surgery.state(plain)) == list(surgery.state(base()))
    torch.testing.assert_close(
        plain(fed.data.normalise(fed.data.x, torch.float64)), algorithm.predict(server, fed.data.x)
    )


WITH_ADAPTERS = sorted(name for name, method in ALGORITHMS.items() if "adapters" not in method.lacks)


KINDS = {*METHODS, *(name for name in ALGORITHMS if "lora" in name)}


@pytest.mark.parametrize("name", some(WITH_ADAPTERS, [name for name in WITH_ADAPTERS if name in KINDS]))
def test_adapted__every_method_trains_adapters_or_says_why_not(federation_of, name):
    fed = federation_of(epochs=1, base_changes=ALGORITHMS[name].base_changes)
    algorithm = made(name, fed)
    server, _ = play(algorithm, fed, rounds=2)[-1]
    assert all(tensor.isfinite().all() for tensor in server["global"].values())
    assert any("base_layer" in name for part in server.values() for name in part) == (name == "flora")


def numpy_mean_product(states, sizes, module):
    """sum_k n_k B_k A_k / n."""
    shares = np.array(sizes) / sum(sizes)
    pairs = [(s[f"{module}.lora_B.weight"].numpy(), s[f"{module}.lora_A.weight"].numpy()) for s in states]
    return sum(p * b.reshape(len(b), -1) @ a.reshape(len(a), -1) for p, (b, a) in zip(shares, pairs))


def product(state, module):
    return adapters.products(state)[module].flatten(1).numpy()


def test_adapted__flexlora_sends_each_client_the_best_of_its_rank(federation_of):
    fed = federation_of(RANKS)
    algorithm = ALGORITHMS["flexlora"](fed)
    clients, rng = [1, 0, 2], Rng(0, 1)
    server, trained = algorithm.round(algorithm.init(), clients, rng)
    states = per_client(trained.received)
    assert [adapters.rank_of(s)["0"] for s in states] == [3, 1, 2]
    sizes = [len(fed.clients.train[client]) for client in clients]
    sent = algorithm.send(server, [0, 1, 2], Rng(0, 2))["model"]
    for module in ("0", "4"):
        u, s, v = np.linalg.svd(numpy_mean_product(states, sizes, module), full_matrices=False)
        for state, rank in zip(sent, (1, 3, 2)):
            best = u[:, :rank] * s[:rank] @ v[:rank]
            np.testing.assert_allclose(product(state, module), best, atol=1e-10)
    expected = sum(n * s["6.weight"] for n, s in zip(sizes, states)) / sum(sizes)
    torch.testing.assert_close(server["global"]["6.weight"], expected)
    assert 0 <= trained.metrics["lost"] < 1 if hasattr(trained, "metrics") else True


def test_adapted__flexlora_of_one_client_is_its_own_training(federation_of):
    options = AdapterOptions("lora", rank=2, train=("6",))
    fed = federation_of(options, participants=1)
    servers = [play(ALGORITHMS[name](fed), fed, rounds=1)[0][0]["global"] for name in ("fedavg", "flexlora")]
    for module in ("0", "4"):
        np.testing.assert_allclose(*(product(server, module) for server in servers), atol=1e-12)


def test_adapted__averages_of_unequal_ranks_are_over_those_who_have_a_row(federation_of):
    fed = federation_of(RANKS)
    algorithm = made("heterofl", fed)
    start = algorithm.init()
    server, trained = algorithm.round(start, [0, 1, 2], Rng(0, 1))
    states = per_client(trained.received)
    rows = [[s["4.lora_A.weight"][r] for s in states if len(s["4.lora_A.weight"]) > r] for r in range(3)]
    assert [len(held) for held in rows] == [3, 2, 1]
    expected = torch.stack([sum(held) / len(held) for held in rows])
    torch.testing.assert_close(server["global"]["4.lora_A.weight"], expected)


def test_adapted__fedsa_lora_keeps_b_and_averages_the_rest(federation_of):
    fed = federation_of()
    algorithm = ALGORITHMS["fedsa_lora"](fed)
    server, trained = play(algorithm, fed, rounds=2)[-1]
    assert set(trained.received) == set(fed.initial()) - {"0.lora_B.weight", "4.lora_B.weight"}
    models = algorithm.client_models(server).levels[0]
    b = [models.state(int(models.used[client]))["4.lora_B.weight"] for client in range(4)]
    assert not torch.equal(b[0], b[1])


def test_adapted__with_b_alone_the_mean_of_adapters_has_the_mean_product(federation_of):
    options = AdapterOptions("lora", rank=2, train=("6",), learn="b")
    fed = federation_of(options)
    assert "4.lora_A.weight" not in fed.initial()
    algorithm = ALGORITHMS["fedavg"](fed)
    server, trained = algorithm.round(algorithm.init(), [0, 1, 2], Rng(0, 1))
    a = dict(fed.model.named_buffers())["4.lora_A.weight"]
    sizes = torch.tensor([len(fed.clients.train[client]) for client in range(3)]).double()
    mean = sum(n * b @ a for n, b in zip(sizes / sizes.sum(), trained.received["4.lora_B.weight"]))
    torch.testing.assert_close(server["global"]["4.lora_B.weight"] @ a, mean)


def test_adapted__adapters_of_smaller_ranks_have_the_first_rows_of_the_same_matrix(federation_of):
    fed = federation_of(replace(RANKS, learn="b"))
    whole, *others = [dict(kind.model.named_buffers())["4.lora_A.weight"] for kind in fed.fleet.architectures[1:]]
    assert all(torch.equal(other, whole[: len(other)]) for other in others)


@pytest.mark.parametrize("name", ["flexlora", "hetlora"])
def test_adapted__all_ranks_learn_though_few_take_part(federation_of, name):
    fed = federation_of(replace(RANKS, ranks=(1, 3)), participants=1)
    algorithm = ALGORITHMS[name](fed)
    server = algorithm.init()
    for number, client in enumerate((0, 1, 0, 1), 1):
        server, _ = algorithm.round(server, [client], Rng(0, number))
        assert server["global"]["4.lora_A.weight"].norm(dim=1).min() > 1e-3
    product = adapters.products(server["global"])["4"]
    assert torch.linalg.matrix_rank(product) == 3


def other():
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))


def test_adapted__another_base_is_refused(tmp_path):
    fl.simulate(CONFIG.replace(rounds=1), tmp_path / "run", model=small)
    with fl_refused("folder", "--init"):
        fl.load_model(tmp_path / "run", model=other)
    with fl_refused("folder", "--init"):
        fl.simulate(CONFIG, tmp_path / "run", resume=True, model=other)


def test_adapted__a_model_of_ones_own_stays_as_it_was_though_the_server_changes_the_base(tmp_path):
    own = small()
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    fl.simulate(CONFIG.replace(algorithm="flora"), tmp_path / "run", model=own)
    model = fl.load_model(tmp_path / "run", model=own)
    assert_same(own.state_dict(), before)
    assert not torch.equal(model[1].weight, own[1].weight)


def small():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))


def with_another_layer():
    return nn.Sequential(nn.ConvTranspose2d(1, 1, 1), small())


@pytest.mark.parametrize(
    "change", [{"algorithm": "flexlora", "adapters": AdapterOptions("lora", ranks=(1, 2))}, {"algorithm": "fesem"}]
)
def test_adapted__a_layer_without_an_adapter_is_named_once(caplog, change):
    fl.build(CONFIG.replace(**{"adapters": AdapterOptions("lora", rank=2)} | change), model=with_another_layer)
    assert caplog.text.count("no adapter for 0: a ConvTranspose2d") == 1


LORA = AdapterOptions("lora", rank=2, train=("3",))
CONFIG = fl.Config.of(
    algorithm="fedavg", rounds=2, clients=6, participants=3, local_epochs=1, adapters=LORA,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {},
        *({"algorithm": name, "adapters": replace(RANKS, train=("3",))} for name in ("flexlora", "flora", "hetlora")),
        {"algorithm": "flora_na"},
        {"adapters": replace(LORA, learn="b")},
        {"adapters": replace(LORA, kind="dora")},
        {"algorithm": "heterofl", "adapters": replace(RANKS, train=("3",), kind="dora")},
        {"algorithm": "heterofl", "adapters": replace(RANKS, train=("3",), learn="b")},
    ],
)
def test_adapted__a_run_folder_has_adapters_and_gives_the_plain_model(tmp_path, change):
    config = CONFIG.replace(**change)
    fl.simulate(config, tmp_path / "whole", model=small)
    fl.simulate(config.replace(rounds=1), tmp_path / "parts", model=small)
    fl.simulate(config, tmp_path / "parts", resume=True, model=small)
    servers = [checkpoint.read_parts(tmp_path / name, small)[1] for name in ("whole", "parts")]
    assert_same(*(server["global"] for server in servers))
    assert any("base_layer" in name for name in servers[0]["global"]) == (config.method.name == "flora")
    fed, algorithm = fl.build(config, model=small)
    model = fl.load_model(tmp_path / "whole", model=small)
    assert list(model.state_dict()) == list(small().state_dict())
    expected = algorithm.predict(servers[0], fed.data.test_x)
    torch.testing.assert_close(model(fed.data.normalise(fed.data.test_x)), expected)
    path = fl.export_model(tmp_path / "whole", tmp_path / "model.safetensors", model=small)
    assert torch.equal(surgery.load(small(), open_state(path))[1].weight, model[1].weight)
    rows = read(tmp_path / "whole" / "metrics.csv")
    if not change:
        assert {row["bytes_up"] for row in rows} == {sum(t.nbytes for t in servers[0]["global"].values())}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "nefl"}, "nefl cuts models by width or depth, and factors of low rank have ranks"),
        ({"adapters": replace(RANKS, train=("3",))}, "fedavg gives all clients one"),
        ({"adapters": replace(LORA, modules=("head",))}, "--adapters: modules='head'"),
        ({"adapters": AdapterOptions(), "algorithm": "flexlora"}, "flexlora averages the products"),
        ({"adapters": AdapterOptions(), "algorithm": "fedsa_lora"}, "fedsa_lora"),
        ({"adapters": AdapterOptions(), "algorithm": "flora"}, "flora stacks adapters"),
        ({"adapters": AdapterOptions(), "algorithm": "flora_na"}, "flora_na"),
        ({"adapters": AdapterOptions(), "algorithm": "hetlora"}, "hetlora weighs both"),
        ({"adapters": replace(LORA, learn="b"), "algorithm": "hetlora"}, "--adapters.learn both"),
        ({"adapters": replace(LORA, rank=0)}, "rank"),
        *(
            ({"adapters": replace(LORA, kind="dora"), "algorithm": name}, f"{name} .* DoRA's have magnitudes")
            for name in ("fedsa_lora", "flexlora", "flora", "flora_na", "hetlora")
        ),
        ({"algorithm": "flexlora", "adapters": replace(LORA, ranks=(1, 2))}, "leave one of them out"),
        ({"adapters": replace(LORA, learn="b"), "algorithm": "flexlora"}, "--adapters.learn both"),
        ({"adapters": replace(LORA, learn="b"), "algorithm": "fedsa_lora"}, "--adapters.learn both"),
    ],
)
def test_adapted__what_is_refused(change, message):
    with pytest.raises(FLError, match=message):
        fl.build(CONFIG.replace(**change), model=small)
