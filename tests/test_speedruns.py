"""The files of speedruns/ compute what the library computes: FedMR bit for bit, the others but for rounding."""

import csv
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from selection import some

import fl
import surgery
from fl.models.architectures import ArchitectureOptions
from fl.settings.recipes import RECIPES

ROOT = Path(__file__).parents[1]


def speedrun(name):
    """The module of a speedrun, anew."""
    spec = importlib.util.spec_from_file_location(f"speedrun_{name}", ROOT / "speedruns" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_fedmr__is_the_library_bit_for_bit(tmp_path, capsys):
    """Partition, weights, sampling, batches, training, recombination, mean and test of the default run."""
    one_file = speedrun("fedmr")
    one_file.ROUNDS = 3
    found = one_file.main()
    printed = [line.split(": ")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    fl.simulate(fl.Config.of(rounds=3, backend="vmap", device=one_file.DEVICE), tmp_path / "run")
    expected = dict(fl.load_model(tmp_path / "run").named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].cpu(), expected[name]) for name in expected)
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    at = rows[0].split(",").index("accuracy")
    assert printed == [f"{float(row.split(',')[at]):.2%}" for row in rows[1:]]


@pytest.mark.slow
def test_femam__has_the_accuracies_of_the_library(tmp_path, capsys):
    """Groups, levels, residuals, clusters, pruning: in every round, but for single samples that rounding decides."""
    one_file = speedrun("femam")
    one_file.ROUNDS = (30, 6, 6, 4)
    found = torch.tensor(one_file.main())
    recipe = RECIPES["femam"]()
    options = replace(recipe.options["femam"], level_rounds=(30, 6))
    settings = {"algorithms": "femam", "rounds": 46, "backend": "vmap", "device": one_file.DEVICE, "femam": options}
    (config,) = recipe.replace(**settings).runs()
    fl.simulate(config, tmp_path / "run")
    with open(tmp_path / "run" / "metrics.csv") as file:
        expected = torch.tensor([float(row["local_test_accuracy"]) for row in csv.DictReader(file)])
    assert (found - expected).abs().max() < 0.02
    assert (found == expected.to(found)).float().mean() > 0.8
    assert found[35] > found[29] + 0.1  # cluster models learn what one model for all cannot


@pytest.mark.slow
@pytest.mark.parametrize("seed", some([0, 1], [0]))
def test_fedfa__is_the_library_but_for_rounding(seed, tmp_path):
    """Which part each client gets, its training, grafting, scaling and the mean over those who have a weight."""
    one_file = speedrun("fedfa")
    one_file.ROUNDS, one_file.EPOCHS, one_file.SEED = (
        1,
        2,
        seed,
    )  # in a second round SGD makes much of a difference in the last digit
    found = one_file.main()
    sizes = ArchitectureOptions(choose="cycle", widths=(0.5, 1.0), depths=("2", "3"))
    settings = {"model": "preresnet20", "norm": "layer", "width": (0.5,), "local_epochs": 2, "lr": 0.05, "rounds": 1}
    config = fl.Config.of(
        algorithm="fedfa", architectures=sizes, seed=seed, backend="vmap", device=one_file.DEVICE, **settings
    )
    fl.simulate(config, tmp_path / "run")
    expected = dict(fl.load_model(tmp_path / "run").named_parameters())
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].cpu(), tensor.detach(), atol=2e-4, rtol=2e-4)


def test_speedruns__are_files_of_their_own():
    """They import nothing of this repository, and are short."""
    for path in (ROOT / "speedruns").glob("*.py"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 300, path
        roots = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
        assert not roots & {"fl", "surgery", "zoo", "benchmarks"}, path


@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_narrow__axes_narrows_as_the_library_does(name):
    """The same positions of every tensor, and the same outputs."""
    axes, image = speedrun("axes"), torch.randn(2, 3, 32, 32)
    if name == "resnet":
        model = torchvision.models.resnet18(num_classes=5)
    else:
        model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, patch_size=8, num_classes=5)
    with torch.no_grad():
        for tensor in surgery.state(model).values():
            tensor.add_(0.05 * torch.rand(tensor.shape)) if tensor.is_floating_point() else None
    small, (expected, _) = axes.narrow(model, 0.5, image[:1]), surgery.narrow(model, 0.5, image)
    found, wanted = surgery.state(small), surgery.state(expected)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert sum(tensor.numel() for tensor in found.values()) < 0.35 * sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(small.eval()(image), expected.eval()(image))


def test_speedruns__axes_keeps_what_it_does_not_know():
    """An operation without a rule fixes all that it touches, and a model of one is as it was."""

    class Sorted(torch.nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x).sort(-1).values)

    model = Sorted(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    small = speedrun("axes").narrow(model, 0.5, torch.zeros(1, 4))
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), model.parameters()))
