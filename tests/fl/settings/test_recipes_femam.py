"""FeMAM's recipes."""

import re
import shlex
from dataclasses import replace

import pytest
import torch

from fl import run as cli
from fl.base.rng import Rng
from fl.data import Dataset
from fl.partition import hold_out
from fl.settings.recipes import RECIPES, describe, femam, overview

SPLITS = {  # name of a row -> clusters and classes of each, of a client over all levels
    "cifar100-clusters30": ((5,), 30),
    "cifar100-clusters50": ((5,), 50),
    "cifar100-clusters80": ((5,), 80),
    "cifar100-levels2-5-9": ((2, 5, 9), 19 + 7 + 3),
    "cifar100-levels3-6-11": ((3, 6, 11), 14 + 6 + 2),
    "tiny-clusters50": ((5,), 50),
    "tiny-clusters90": ((5,), 90),
    "tiny-clusters140": ((5,), 140),
    "tiny-levels4-13-21": ((4, 13, 21), 20 + 6 + 2),
    "tiny-levels9-15-22": ((9, 15, 22), 9 + 5 + 2),
    **{f"{data}-{split}": (None, None) for data in ("cifar100", "tiny") for split in ("dir0.1", "iid")},
}
SIZES = {"cifar100": (45_000, 5_000, 10_000), "tiny": (95_000, 5_000, 10_000)}  # appendix C.1
CLASSES = {"cifar100": 100, "tiny": 200}


def test_there_is_a_row_for_every_pair_of_columns_and_the_overview_names_it():
    assert set(femam.TABLE) == {f"femam-{name}" for name in SPLITS}
    lines = "\n".join(overview()[name] for name in femam.OVERVIEW)
    for name in SPLITS:
        data, split = name.split("-", 1)
        assert re.search(rf"femam-{data}-.*?\b{re.escape(split)}\b", lines, re.DOTALL), name


@pytest.mark.parametrize("name", SPLITS)
def test_the_settings_are_the_papers_and_the_samples_can_be_dealt_out(name):
    """On as many labels as the pooled data sets have: who gets how much, of how many classes, in which clusters."""
    config, (counts, classes) = RECIPES[f"femam-{name}"](), SPLITS[name]
    data = name.split("-")[0]
    assert (config.clients, config.cohort(), config.local_epochs, config.rounds) == (50, 50, 2, 700)
    assert (config.lr, config.momentum, config.batch_size, config.model) == (0.01, 0, 32, "resnet9")
    assert len(config.seeds) == 4
    assert config.algorithm == femam.METHODS

    labels = torch.arange(sum(SIZES[data])) % CLASSES[data]
    pooled = Dataset(data, torch.empty(0), labels, torch.empty(0), labels[:0], CLASSES[data])
    for seed in config.seeds:
        parts, structure = config.deal(pooled, Rng(seed).numpy("partition"))
        splits = hold_out(parts, config.local_valid, config.local_test, Rng(seed).numpy("hold-out"))
        held = (splits.train, splits.valid, splits.test)
        assert all(abs(len(part.samples) - size) <= 12 for part, size in zip(held, SIZES[data]))
        assert int(splits.valid.sizes.min()) >= 30
        assert sum(part.samples.numel() for part in held) == len(labels)  # none is left over
        known = [len(labels[part].unique()) for part in parts]
        if counts:
            assert set(known) == {classes}
            assert [len(level.unique()) for level in structure] == list(counts)
        elif config.partition == "iid":
            assert min(known) >= 0.98 * CLASSES[data]
        else:
            assert min(known) <= CLASSES[data] / 3  # very different mixtures
    assert config.pool_test_set


def test_the_methods_settings_are_the_papers():
    config = RECIPES["femam-cifar100-iid"]()
    assert (config.fedprox.mu, config.pfedme.lam, config.pfedme.mu, config.ditto.lam) == (0.1, 0.1, 0.01, 0.1)
    assert (config.fedrep.head_epochs, config.fedavg_plus.epochs, config.fesem_plus.epochs) == (2, 2, 2)
    assert config.fesem.clusters == config.fesem_plus.clusters == 5
    assert config.femam.levels == ("global", "5", "5", "5", "personal")
    assert config.femam.level_rounds == (400, 50)
    assert (config.femam.combine, config.femam.start, config.femam.clustering) == ("sum", "random", "nearest")


def test_the_numbers_are_told():
    """Corners of the paper's tables, and what its text says of them."""
    for name, method, accuracy, f1 in (
        ("cifar100-clusters30", "local", "22.81±0.11", "13.80±0.33"),
        ("tiny-clusters140", "fedprox", "30.28±0.15", "22.16±0.14"),
        ("tiny-clusters50", "femam", "46.80±0.35", "43.29±0.34"),
        ("cifar100-clusters80", "femam", "40.36±0.12", "36.05±0.04"),
        ("tiny-iid", "local", "2.95±0.01", "1.28±0.03"),
        ("cifar100-dir0.1", "ditto", "56.06±0.48", "30.71±0.34"),
        ("tiny-dir0.1", "femam", "56.44±0.17", "33.29±0.15"),
        ("tiny-levels4-13-21", "fesem_plus", "45.83±0.48", "32.18±0.61"),
        ("cifar100-levels3-6-11", "pfedme", "51.85±0.17", "44.10±0.41"),
    ):
        assert f" {method} {accuracy} and {f1}" in " ".join(describe(f"femam-{name}").split()), name
    told, total = {}, 0
    for name in SPLITS:
        text = describe(f"femam-{name}")
        cells = re.findall(r"(\w+) (\d?\d\.\d\d)±\d\.\d\d and (\d?\d\.\d\d)±\d\.\d\d", text)
        assert [method for method, *_ in cells] == list(femam.METHODS)
        told[name] = {method: float(accuracy) for method, accuracy, _ in cells}
        total += sum(float(number) for _, *pair in cells for number in pair)
        assert max(told[name], key=told[name].get) == ("fedprox" if "iid" in name else "femam")  # appendix C.5
        head = text.splitlines()[0]
        assert f"{told[name]['femam']:.2f}±" in head
        assert re.search(r"Table (C\.\d)", head)[1] == {"c": "C.2", "l": "C.4"}.get(name.split("-")[1][0], "C.3")
        assert ("60.46±0.35 for FeMAM" in text) == (name == "tiny-dir0.1")
    assert total == pytest.approx(8155.37)  # no digit was mistyped


def test_the_released_codes_differences_are_flags():
    config = RECIPES["femam-tiny-iid"]()
    text = describe("femam-tiny-iid").split("released code differs")[1]
    flags = shlex.split(" ".join(re.findall(r"(--.*?) \(", text)))
    got, folder = cli.parse(["femam-tiny-iid", *flags])
    released = {"combine": "mean", "start": "global", "prox": 0.02, "clustering": "kmeans", "compare": "classifier"}
    assert got.femam == replace(config.femam, prox_all_levels=True, **released)
    assert replace(got, femam=config.femam) == config
    assert folder is None


@pytest.mark.parametrize(
    ("flags", "spread"),
    [
        ("", "clusters5"),
        ("--partition dirichlet --alpha 0.1 --lr 0.1", "dirichlet0.1"),
        ("--partition iid", "iid"),
        ("--clusters 2,3 --cluster-classes 2,2", "clusters2,3"),
    ],
)
def test_fashion_mnist_with_other_partitions(flags, spread):
    assert f"python -m fl.run femam-fashion-mnist {flags}".strip() + "\n" in describe("femam-fashion-mnist")
    config, _ = cli.parse(["femam-fashion-mnist", *flags.split()])
    config.check()
    assert config.spread() == spread
    labels = torch.arange(config.samples) % 10
    parts, _ = config.deal(Dataset("labels", torch.empty(0), labels, torch.empty(0), labels, 10), Rng(0).numpy("p"))
    assert len(parts) == 50
    assert len(parts.samples) == config.samples  # none is left over
    sizes = hold_out(parts, config.local_valid, config.local_test, Rng(0).numpy("hold-out"))
    assert sizes.total == config.samples
