"""FedFA's recipes, and HeteroFL's and NeFL's."""

import re
from itertools import product

import pytest
import torch
from selection import some

from fl import run as cli
from fl.data import Dataset
from fl.models.fleet import plan_within
from fl.runs.assembly import model_spec
from fl.settings import Config
from fl.settings.recipes import RECIPES, describe, fedfa, overview
from zoo import Spec

IMAGES = {"cifar10": (3, 32, 10), "cifar100": (3, 32, 100), "fashion-mnist": (1, 28, 10)}
NETWORKS = {"preresnet": "preresnet18", "mobilenetv2": "mobilenetv2", "efficientnetv2": "efficientnetv2_cifar"}
RIVAL = {"depth": "flexifed", "width": "heterofl", "both": "nefl"}
ROWS = {f"fedfa-{'-'.join(parts)}": parts for parts in product(IMAGES, NETWORKS, RIVAL, ("iid", "noniid"))}
TEXTS = {f"fedfa-wikitext2-{mode}": mode for mode in RIVAL}
SMALL = {f"fedfa-{name}": name for name in fedfa.SMALL}
OWN = ("heterofl-cifar10", "nefl-cifar10")


def test_there_is_one_for_every_comparison_and_the_overview_names_it():
    assert set(fedfa.TABLE) == {*ROWS, *TEXTS}
    assert set(RECIPES) >= {*ROWS, *TEXTS, *SMALL, *OWN}
    lines = str({name: overview()[name] for name in fedfa.OVERVIEW})
    for part in {part for name in fedfa.TABLE for part in name.split("-")}:
        assert re.search(rf"\b{part}\b", lines), part


@pytest.mark.parametrize("name", [*ROWS, *TEXTS, *SMALL, *OWN])
def test_their_commands_can_be_run(name):
    text = describe(name)
    commands = re.findall(r"^ *python -m fl\.run (\S+)(.*)$", text, re.MULTILINE)
    assert commands[0] == (name, "")
    for recipe, flags in commands:
        assert recipe == name
        config = RECIPES[name]()
        if name not in fedfa.TABLE or name == "fedfa-cifar10-preresnet-both-iid":  # the others have the same flags
            config, _ = cli.parse([recipe, *flags.split()])
        else:
            assert flags in ("", " --attack.share 0.2 --attack.amplify 20")
        config.check()
        assert Config.from_yaml(config.to_yaml()) == config
    assert "reconstruction" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", ROWS)
def test_the_settings_of_images(name):
    data, network, mode, spread = ROWS[name]
    config = RECIPES[name]()
    assert config.algorithm == (RIVAL[mode], "fedfa")
    assert (config.dataset, config.model, config.seeds) == (data, NETWORKS[network], (0, 1, 2))
    assert (config.clients, config.cohort(), config.local_epochs, config.batch_size) == (100, 10, 5, 10)
    assert (config.lr, config.momentum, config.weight_decay, config.clip) == (0.1, 0.9, 5e-4, 1)
    assert [round(config.schedule()(config.rounds * s // 100 + 1), 4) for s in (0, 49, 50, 75)] == [1, 1, 0.1, 0.01]
    assert config.norm == "static_batch"
    assert (config.crop, config.flip) == ((4, True) if data.startswith("cifar") else (0, False))
    expected = ("iid-unequal", False, 400) if spread == "iid" else ("shards0.2", True, 800)
    assert (config.spread(), config.masked_loss, config.rounds) == expected
    assert (config.architectures.choose, config.architectures.weak) == ("zico", 0.5)
    assert config.architectures.widths == ((1.0,) if mode == "depth" else (0.5, 0.75, 1.0))
    deep = ("2", "3") if network == "preresnet" else config.architectures.depths  # one block would be a corner
    assert config.architectures.depths == (() if mode == "width" else deep)
    spec = config.spec()
    assert spec in config.architectures.announce(spec)  # the model is the largest candidate
    assert config.architectures.announce(spec).largest == spec


@pytest.mark.parametrize("name", TEXTS)
def test_the_settings_of_text(name):
    config = RECIPES[name]()
    assert config.algorithm == (RIVAL[TEXTS[name]], "fedfa")
    words = torch.zeros(2, 64, dtype=torch.int32)
    spec = model_spec(config, Dataset("words", words, words.long(), words, words.long(), 33_278))
    assert (config.text.vocabulary, config.text.length, config.clients, config.cohort()) == (0, 64, 100, 10)
    assert (spec.tokens, spec.depth, spec.dropout, spec.num_classes) == (64, (4,), 0.2, 33_278)
    assert [round(config.schedule()(number), 4) for number in (50, 51, 100, 101)] == [1, 0.1, 0.1, 0.01]
    model = spec.build(device="meta")
    assert model.embedding.token.weight.shape == (33_278, 256)
    assert model.section1[0].fc1.weight.shape == (512, 256)
    assert model.section1[0].attention.heads == 8
    if TEXTS[name] == "both":
        check_candidates(config, spec)


BOTH = [name for name in ROWS if name.endswith("both-iid")]


@pytest.mark.parametrize("name", some(BOTH, BOTH[::3]))
def test_the_models_take_their_images(name):
    """The full one and the smallest, with the 10 images of a step, on the meta device."""
    data, network, *_ = ROWS[name]
    channels, side, classes = IMAGES[data]
    config = RECIPES[name]()
    x, y = torch.zeros(2, channels, side, side, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    spec = model_spec(config, Dataset("zeros", x, y, x, y, classes))
    for one in (spec, config.architectures.announce(spec).smallest):
        assert one.build(device="meta")(one.example(10, device="meta")).shape == (10, classes)
    if network == "preresnet":
        widths = [getattr(spec.build(device="meta"), f"section{i}")[0].conv2.out_channels for i in (1, 2, 3, 4)]
        assert widths == [64, 128, 256, 512]
        assert spec.depth == (3, 3, 3, 3)
    if data == "cifar10":  # the same for all data
        check_candidates(config, spec)


def check_candidates(config: Config, full: Spec) -> None:
    """The largest is the model itself, and the smallest a part of it that stands for all the blocks that it lacks."""
    space = config.architectures.announce(full)
    assert len(set(space)) == 3 * len(config.architectures.depths)
    assert space.largest == full
    assert full in space
    model = full.build(device="meta")
    plan = plan_within(model, space.smallest.build(device="meta"), "corner")
    written = {source.name for sources in plan.entries.values() for source in sources}
    assert written == set(plan.shapes)
    assert all(few >= min(2, many) for few, many in zip(space.smallest.depth, full.depth))


def test_the_papers_numbers_are_told():
    iid, own = "(accuracy)", "on the clients' own classes (models_own_accuracy)"
    for name, table, numbers, target in (
        ("cifar10-preresnet-depth-iid", "Table 1", [("1.00-1.04", iid), ("1.22-2.09", iid)], 0.7),
        ("cifar10-preresnet-depth-noniid", "Table 1", [("0.98-1.02", own), ("1.00-1.20", f"on all {iid}")], 0.4),
        ("cifar100-mobilenetv2-depth-noniid", "Table 1", [("2.21-3.31", own), ("1.21-1.74", f"on all {iid}")], 0.25),
        ("cifar100-preresnet-width-iid", "Table 1", [("1.01-1.16", iid), ("1.07-1.47", iid)], 0.25),
        ("fashion-mnist-preresnet-width-iid", "Table 1", [], 0.8),
        ("fashion-mnist-preresnet-width-noniid", "Table 1", [("0.99-1.13", own), ("1.00-1.16", f"on all {iid}")], 0.3),
        ("cifar10-mobilenetv2-width-noniid", "Table 1", [("0.89-2.37", own), ("1.11-1.22", f"on all {iid}")], 0.4),
        ("cifar10-efficientnetv2-both-iid", "Table 1", [("1.00-1.02", iid), ("1.01-2.11", iid)], 0.7),
        ("cifar10-preresnet-both-noniid", "Table 1", [("0.99-1.06", own), ("0.95-1.06", f"on all {iid}")], 0.4),
        ("cifar10-preresnet-both-noniid", "Table 1", [("1.30-2.65", own), ("1.23-1.63", f"on all {iid}")], 0.4),
        ("wikitext2-both", "Table 3", [("1.07-4.50", "FedFA's")], None),
    ):
        text = " ".join(describe(f"fedfa-{name}").split())
        for number, place in numbers:
            assert re.search(rf"{number} times [\w' ]*{re.escape(place)}", text), (name, number)
        assert table in text
        if target:
            assert f"python -m fl.compare RUN --target {target} " in text
            assert "--attack.share 0.2 --attack.amplify 20 " in text
            assert "a share of 0.01, or an amplify (lambda) of 1" in text
            assert "0.95-1.02 times" in text
    for name in (*ROWS, *TEXTS):
        for depths in RECIPES[name]().architectures.depths:
            assert depths in describe(name)


def test_the_small_ones():
    for name in SMALL:
        config = RECIPES[name]()
        assert {"fedfa", "heterofl", "nefl"} == set(config.algorithm)
        assert (config.architectures.choose, config.architectures.weak) == ("zico", 0.5)
        space = config.architectures.announce(config.spec())
        assert len(space) == 4
        assert min(space.smallest.depth) == 2  # a block that can be grafted beside the one that changes the shape
    config = RECIPES["fedfa-digits"]()
    assert (config.dataset, config.spread(), config.masked_loss) == ("digits", "shards0.2", True)


def test_heterofls_and_nefls_own():
    config = RECIPES["heterofl-cifar10"]()
    assert (config.rounds, config.spread(), config.norm, config.clip) == (400, "iid", "static_batch", 1)
    factors = [config.schedule()(number) for number in (150, 151, 250, 251)]
    assert factors == pytest.approx([1, 0.1, 0.1, 0.01])
    space = config.architectures.announce(config.spec())
    assert [spec.width[0] for spec in space] == [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]
    assert {spec.depth for spec in space} == {(2, 2, 2, 2)}
    config = RECIPES["nefl-cifar10"]()
    assert [width**2 for width in config.architectures.widths] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1])
    assert (config.rounds, config.batch_size, config.nefl.step_sizes, config.norm) == (500, 32, True, "batch")
    factors = [config.schedule()(number) for number in (250, 251, 375, 376)]
    assert factors == pytest.approx([1, 0.1, 0.1, 0.01])
