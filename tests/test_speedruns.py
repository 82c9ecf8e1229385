"""The files of speedruns/ compute what the library computes, bit for bit."""

import importlib.util
from pathlib import Path

import torch

import fl

ROOT = Path(__file__).parents[1]


def speedrun(name):
    """The module of a speedrun, anew."""
    spec = importlib.util.spec_from_file_location(f"speedrun_{name}", ROOT / "speedruns" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fedmr_is_the_library_bit_for_bit(tmp_path, capsys):
    """Partition, weights, sampling, batches, training, recombination, mean and test of the default run."""
    one_file = speedrun("fedmr")
    one_file.ROUNDS = 3
    found = one_file.main()
    printed = [line.split(": ")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    fl.simulate(fl.Config(rounds=3, backend="vmap", device=one_file.DEVICE), tmp_path / "run")
    expected = dict(fl.load_model(tmp_path / "run").named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].cpu(), expected[name]) for name in expected)
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    at = rows[0].split(",").index("accuracy")
    assert printed == [f"{float(row.split(',')[at]):.2%}" for row in rows[1:]]


def test_speedruns_are_files_of_their_own():
    """They import nothing of this repository, and are short."""
    for path in (ROOT / "speedruns").glob("*.py"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 300, path
        roots = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
        assert not roots & {"fl", "surgery", "zoo", "benchmarks"}, path
