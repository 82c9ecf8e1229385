"""Exported models, run where they were exported to."""

from dataclasses import replace

import pytest
import torch
from fl_flags import OF_METHOD, TINY
from refusals import fl_refused
from safetensors.torch import load_file
from torch import nn

import fl
from fl import run as cli
from fl.base.errors import FLError
from fl.export import main
from fl.extensions.language.adapters import AdapterOptions, fold_adapters
from fl.runs.export import client_model
from fl.runs.folder import restore_server
from surgery.adapters import read_peft

CONFIG = fl.Config.of(algorithm="fedavg", clients=4, participants=2, rounds=1, local_epochs=1, width=0.1, batch_size=50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    fl.simulate(CONFIG, path)
    return path


def images(count=5):
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1


def run_file(path, model, x):
    """The output of the model that takes an exported state dict."""
    model.load_state_dict(load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True))
    return model.eval()(x)


@pytest.mark.slow
def test_export_model__a_run_of_which_no_round_was_trained_is_exported_with_a_warning(
    folder, tmp_path, monkeypatch, caplog
):
    def fails(*_):
        raise RuntimeError

    monkeypatch.setattr("fl.runs.simulation.one_round", fails)
    with pytest.raises(RuntimeError):
        fl.simulate(CONFIG, tmp_path / "run")
    fl.export_model(tmp_path / "run", tmp_path / "model.pt")
    assert "no round of" in caplog.text
    caplog.clear()
    fl.export_model(folder, tmp_path / "trained.pt")
    assert not caplog.text


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_export__the_file_computes_what_the_model_does(folder, tmp_path, suffix, capsys):
    path = tmp_path / f"model.{suffix}"
    assert main([str(folder), str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    model = fl.load_model(folder)
    fresh = fl.build(CONFIG)[0].model
    for count in (1, 5):
        torch.testing.assert_close(run_file(path, fresh, images(count)), model(images(count)), rtol=1e-4, atol=1e-5)


def perceptron():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


@pytest.mark.slow
def test_export_model__a_run_of_a_model_and_data_of_one_s_own_is_exported_with_them(tmp_path):
    data, folder = fl.data.load("digits"), tmp_path / "run"
    data = fl.Dataset.from_arrays(data.x[:200], data.y[:200], data.test_x[:50], data.test_y[:50], top=16)
    config = CONFIG.replace(algorithm="local", width=1.0)
    fl.simulate(config, folder, dataset=data, model=perceptron)
    own = {"model": perceptron, "dataset": data}
    net = perceptron()

    def logits(file, **asked):
        net.load_state_dict(torch.load(fl.export_model(folder, tmp_path / file, **asked), weights_only=True))
        return net(data.normalise(data.test_x))

    deployed = logits("model.pt", model=perceptron)
    torch.testing.assert_close(deployed, fl.load_model(folder, perceptron)(data.normalise(data.test_x)))
    fed, algorithm = fl.build(fl.Config.read(folder), data, perceptron)
    server, _ = restore_server(fl.Config.read(folder), folder, algorithm, fed.spec)
    expected = algorithm.predict(server, data.test_x, 1)
    torch.testing.assert_close(logits("client.pt", client=1, **own), expected)
    assert not torch.allclose(deployed, expected)
    for asked, message in (
        ({}, r"a model of your own, Sequential: give it from Python"),
        ({"client": 1, "model": perceptron}, r"fl\.export_model"),
        ({"client": 1, "dataset": data}, r"fl\.export_model"),
        ({"client": 1, **own, "dataset": replace(data, x=16 - data.x)}, "a run on other data"),
        ({"client": 1, **own, "model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10))}, "another Sequential"),
    ):
        with pytest.raises(FLError, match=message):
            fl.export_model(folder, tmp_path / "other.pt", **asked)
    with fl_refused("argument"):
        fl.export_model(net, tmp_path / "other.pt", model=perceptron)


@pytest.mark.slow
def test_export__adapters_alone_are_a_folder_of_peft(folder, tmp_path, capsys):
    base = perceptron()
    options = AdapterOptions("lora", rank=2, modules=("1",), train=("3",))
    config = CONFIG.replace(width=1.0, adapters=options)
    x = images()
    for method in ("fedavg", "local"):
        fl.simulate(config.replace(algorithm=method), tmp_path / method, model=base)
    fl.export_model(tmp_path / "fedavg", tmp_path / "all", model=base, format="peft")
    expected = fl.load_model(tmp_path / "fedavg", base)(x)
    torch.testing.assert_close(read_peft(base, tmp_path / "all")(x), expected)
    asked = {"client": 1, "model": base}
    fl.export_model(tmp_path / "local", tmp_path / "one", format="peft", **asked)
    torch.testing.assert_close(
        read_peft(base, tmp_path / "one")(x), fold_adapters(client_model(tmp_path / "local", 1, base))(x)
    )
    fl.export_model(tmp_path / "local", tmp_path / "one.pt", **asked)
    whole = perceptron()
    whole.load_state_dict(torch.load(tmp_path / "one.pt", weights_only=True))
    torch.testing.assert_close(whole(x), read_peft(base, tmp_path / "one")(x))
    fl.simulate(config.replace(algorithm="flora"), tmp_path / "flora", model=base)
    with fl_refused("unsupported", "flora"):
        fl.export_model(tmp_path / "flora", tmp_path / "other", model=base, format="peft")
    with fl_refused("file"):
        fl.export_model(tmp_path / "fedavg", tmp_path / "all", model=base, format="peft")
    convolutional = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    fl.simulate(config.replace(adapters=AdapterOptions("lora", rank=2)), tmp_path / "norm", model=convolutional)
    with fl_refused("unsupported", "--adapters.train"):
        fl.export_model(tmp_path / "norm", tmp_path / "other", model=convolutional, format="peft")
    fl.simulate(CONFIG.replace(adapters=AdapterOptions("lora", rank=2)), tmp_path / "drawn")
    with fl_refused("unsupported", "--init"):
        fl.export_model(tmp_path / "drawn", tmp_path / "other", format="peft")
    assert main([str(folder), str(tmp_path / "other"), "--format", "peft"]) == 2
    assert "has no adapters" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local", "fesem", "fedavg_plus", "fedrep", "heterofl", "nefl", "fedavg", "femam"])
def test_export_model__a_client_s_model_predicts_as_the_client_does(tmp_path, name):
    """Or is refused, where it adds several models up."""
    mixed = ["--architectures.widths", "0.5,1", "--architectures.choose", "cycle"] * (name in ("heterofl", "nefl"))
    folder = tmp_path / "run"
    flags = ["--algorithm", name, *TINY, *mixed, *OF_METHOD.get(name, []), "--out", str(tmp_path), "--name", "run"]
    assert cli.main(flags) == 0
    config = fl.Config.read(folder)
    fed, algorithm = fl.build(config)
    server, _ = restore_server(config, folder, algorithm, fed.spec)
    levels, several = algorithm.client_models(server).levels, 0
    for client in range(4):
        if sum(int(level.used[client]) >= 0 for level in levels) > 1:
            several += 1
            with pytest.raises(FLError, match=r"predicts with \d models.*fl.Pathways"):
                fl.export_model(folder, tmp_path / "model.pt", client=client)
            continue
        expected = algorithm.predict(server, fed.data.test_x[:20], client)
        model = client_model(folder, client)
        torch.testing.assert_close(model(fed.data.normalise(fed.data.test_x[:20])), expected, rtol=1e-4, atol=1e-5)
    assert bool(several) == (name == "femam")
