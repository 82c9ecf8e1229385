"""Wishes about training: clients, methods, and what a run leaves."""

import gc
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fl
from benchmarks.wishes import error_of
from benchmarks.wishes.data import RNG, TABLE, X, Y, clients, table

DATA = fl.Dataset.from_arrays(*TABLE)
TRIO = fl.Dataset.from_arrays(*TABLE, owners=np.repeat([0, 1, 2], [20, 50, 90]))
CONFIG = fl.Config.of(algorithm="fedavg", clients=4, partition="iid", rounds=3, lr=0.1, local_epochs=1)


def net(inputs: int = 4) -> nn.Module:
    """Return a small perceptron with the same weights each time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, 2))


def same_seed():
    states = []
    for number in (0, 1):
        torch.manual_seed(number)
        fl.simulate(CONFIG, f"run{number}", dataset=DATA, model=net())
        states.append(fl.load_model(f"run{number}", model=net()).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def no_leak():
    def tensors() -> int:
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    counts = []
    for number in range(4):
        fl.simulate(CONFIG, f"run{number}", dataset=DATA, model=net())
        counts.append(tensors())
    assert counts[1] == counts[2] == counts[3], counts


def best_model():
    config = CONFIG.replace(rounds=6, lr=1.0, keep_best=True, best_by="loss")
    best = fl.simulate(config, "run", dataset=DATA, model=net())["best"]
    kept = fl.load_model("run", model=net(), best=True)
    losses = {int(row["round"]): float(row["loss"]) for row in table("run/metrics.csv")}
    assert best["round"] == min(losses, key=losses.get)
    assert abs(F.cross_entropy(kept(DATA.test_x), DATA.test_y).item() - best["loss"]) < 1e-5


def divergence():
    for method in ("scaffold", "feddyn", "fedrep"):
        config = CONFIG.replace(algorithm=method, lr=1e30)
        error = error_of(lambda: fl.simulate(config, f"run-{method}", dataset=DATA, model=net()))  # noqa: B023
        assert isinstance(error, fl.FLError), method


def frozen():
    for method in ("fedavg", "fedmr", "scaffold", "fedadam", "ditto"):
        model = net()
        model[0].requires_grad_(False)
        fl.simulate(CONFIG.replace(algorithm=method), f"run-{method}", dataset=DATA, model=model)
        trained = fl.load_model(f"run-{method}", model=net())
        assert torch.equal(trained[0].weight, net()[0].weight), method
        assert not torch.equal(trained[2].weight, net()[2].weight), method


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, num_labels=2, **sizes))
    y, lengths = np.arange(60) % 2, RNG.integers(2, 7, size=60)
    words = fl.data.pad([np.full(n, 5 + 3 * k) for n, k in zip(lengths, y)])
    x = {"input_ids": words["x"].astype("int64"), "attention_mask": words["mask"]}
    parts = [{name: part[rows] for name, part in x.items()} for rows in (slice(40), slice(40, 60))]
    data = fl.Dataset.from_arrays(parts[0], y[:40], parts[1], y[40:])
    final = fl.simulate(CONFIG.replace(rounds=2, lr=0.05), "run", dataset=data, model=model)["final"]
    trained = fl.load_model("run", model=model).eval()
    logits = trained(**{name: torch.tensor(part) for name, part in parts[1].items()}).logits
    assert abs(F.cross_entropy(logits, torch.tensor(y[40:])).item() - final["loss"]) < 1e-4


def schedule():
    options = {
        "lr_schedule": "exponential",
        "lr_decay": 0.5,
        "momentum": 0.0,
        "batch_size": 90,
        "last_batch": "partial",
    }
    config = CONFIG.replace(partition="natural", clients=3, participants=3, **options)
    fl.simulate(config, "run", dataset=TRIO, model=net())
    state, model = net().state_dict(), net()
    for number in range(3):
        sums = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for rows in (slice(20), slice(20, 70), slice(70, 160)):
            model.load_state_dict(state)
            model.zero_grad()
            F.cross_entropy(model(DATA.x[rows]), DATA.y[rows]).backward()
            for name, weight in model.named_parameters():
                sums[name] += len(DATA.y[rows]) / 160 * (weight.data - 0.1 * 0.5**number * weight.grad)
        state = sums
    trained = fl.load_model("run", model=net()).state_dict()
    assert all(torch.allclose(trained[name], state[name], atol=1e-6) for name in state)


def client_models():
    config = CONFIG.replace(algorithm="ditto", partition="natural", clients=3, local_test=0.3)
    for last in fl.Run(config, "run", dataset=TRIO, model=net()):
        models = [last.client_model(k).eval() for k in range(3)]
    printed = [float(row["test_accuracy"]) for row in clients()]
    rows = [client.test for client in fl.build(config, TRIO, net())[0].clients]
    right = [(model(TRIO.x[k]).argmax(1) == TRIO.y[k]).float().mean().item() for model, k in zip(models, rows)]
    assert np.allclose(printed, right)


def own_architectures():
    deep = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    for method in ("local", "fedproto", "fedmd"):
        config = CONFIG.replace(algorithm=method, local_test=0.2, participants=4)
        for last in fl.Run(config, f"run-{method}", dataset=DATA, model=[net(), deep]):
            models = [last.client_model(k) for k in range(4)]
        assert [len(model) for model in models] == [3, 5, 3, 5], method
        assert last.row["local_test_accuracy"] > 0.5, method


def failures():
    config = CONFIG.replace(clients=10, participants=10, rounds=8, min_samples=1, failures={"share": 0.3})
    fl.simulate(config, "run", dataset=DATA, model=net())
    dropped = [float(row["dropped"] or 0) for row in table("run/metrics.csv")]
    assert len(set(dropped)) > 1
    assert 8 <= sum(dropped) <= 40


def curves():
    rows = []
    fl.simulate(CONFIG, "run", dataset=DATA, model=net(), on_round=rows.append)
    assert len(rows) == 3
    assert [float(row["accuracy"]) for row in table("run/metrics.csv")] == [row["accuracy"] for row in rows]
    assert Path("run/curves.png").read_bytes()[:4] == b"\x89PNG"


def own_methods():
    for method, settings in {
        "fedmr": {},
        "femam": {"local_valid": 0.2, "local_test": 0.2, "femam": {"start": "global"}},
    }.items():
        config = CONFIG.replace(algorithm=method, rounds=6, participants=4, **settings)
        final = fl.simulate(config, f"run-{method}", dataset=DATA, model=net())["final"]
        assert final.get("local_test_accuracy", final["accuracy"]) > max(np.bincount(Y)) / len(X)
