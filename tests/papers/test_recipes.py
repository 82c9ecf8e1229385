"""The papers' recipes can be run, and have the papers' settings and numbers."""

import re
import shlex
from itertools import product

import pytest
import torch
from fl_flags import TINY
from selection import some

from benchmarks.papers import __main__ as command
from benchmarks.papers.recipes import RECIPES, fedfa, fedmr, femam
from fl import run as cli
from fl.base.rng import Rng
from fl.data import Dataset
from fl.models import create
from fl.models.fleet import plan_within
from fl.partition import hold_out
from fl.runs.assembly import model_spec
from fl.settings import Config, Experiment
from fl.settings.command_line import parse
from fl.settings.recipes import describe, overview

IMAGES = {  # channels, side and classes
    "cifar10": (3, 32, 10), "cifar100": (3, 32, 100), "femnist": (1, 28, 62), "fashion-mnist": (1, 28, 10),
}  # fmt: skip
RIVAL = {"depth": "flexifed", "width": "heterofl", "both": "nefl"}
DATA = ("cifar10", "cifar100", "fashion-mnist")
ROWS = {
    f"fedfa-{'-'.join(parts)}": parts
    for parts in product(DATA, ("preresnet", "mobilenetv2", "efficientnetv2"), RIVAL, ("iid", "noniid"))
}
TEXTS = {f"fedfa-wikitext2-{mode}": mode for mode in RIVAL}
FEDMR = [
    *(f"fedmr-{'-'.join(parts)}" for parts in product(
        ("cifar10", "cifar100"), ("cnn", "resnet20", "vgg16"), ("dir0.1", "dir0.5", "dir1.0", "iid"))),
    *(f"fedmr-femnist-{model}" for model in ("cnn", "resnet20", "vgg16")),
]  # fmt: skip
SPLITS = {  # a row of FeMAM's tables -> clusters, and classes of a client over all levels
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


def factors(config, *rounds):
    """Those of the learning rate in some rounds."""
    schedule = config.local.schedule(config.rounds)
    return [round(schedule(number), 6) for number in rounds]


def space_of(config):
    """The architectures of the clients."""
    return config.model.architectures.announce(config.model.spec(config.data))


def blank(data):
    """A data set of two images, whose shape and classes are right."""
    channels, side, classes = IMAGES[data]
    x, y = torch.zeros(2, channels, side, side, dtype=torch.uint8), torch.tensor([0, classes - 1])
    return Dataset("zeros", x, y, x, y, classes)


SINGLE = [name for name in RECIPES if name not in {*FEDMR, *ROWS, *TEXTS} and name.split("-", 1)[1] not in SPLITS]
SINGLE = [name for name in SINGLE if not name.endswith("-released")]


@pytest.mark.parametrize("name", some(SINGLE, ["fedfa-cifar10", "heterofl-cifar10", "vit-cifar10", "fedadam-cifar10"]))
def test_recipes__a_recipe_can_be_run_and_says_how(name):
    experiment, text = RECIPES[name](), describe(RECIPES[name])
    experiment.check()
    assert Experiment.from_yaml(experiment.to_yaml()).runs() == experiment.as_read().runs()
    commands = re.findall(r"^ *python -m benchmarks\.papers (\S+)(.*)$", text, re.MULTILINE)
    assert commands[0] == (name, "")
    for recipe, flags in commands[1:]:
        assert recipe == name
        parse([recipe, *shlex.split(flags)], RECIPES).experiment.check()


def test_recipes__there_is_one_for_every_row_of_the_tables_which_says_so():
    for paper, names in {fedmr: FEDMR, fedfa: [*ROWS, *TEXTS], femam: [f"femam-{name}" for name in SPLITS]}.items():
        assert {*paper.TABLE} == {*names}
        assert paper is fedfa or [*paper.RELEASED] == [f"{name}-released" for name in paper.TABLE]
        assert all(f"benchmarks.papers {name}\n" in describe(RECIPES[name]) for name in names)
    assert len(RECIPES) == 165


def test_recipes__the_command_lists_recipes(capsys):
    assert command.main(["femam-tiny-clusters"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    lines = {name: line.strip() for name, line in lines.items()}
    assert lines == {name: line for name, line in overview(RECIPES).items() if "femam-tiny-clusters" in name}
    assert len(lines) == 6


@pytest.mark.slow
def test_recipes__the_command_runs_a_row_on_other_data(tmp_path):
    flags = [*TINY, "--dataset", "digits", "--rounds", "1", "--seeds", "0", "--algorithm", "fedgen"]
    assert command.main(["fedmr-cifar100-cnn-dir0.1", *flags, "--out", str(tmp_path), "--name", "a"]) == 0
    config = Config.read(tmp_path / "a")
    assert (config.method.options.alpha, config.method.options.beta) == (10.0, 1.0)
    assert "fedprox" not in (tmp_path / "a" / "config.yaml").read_text()


def test_recipes__fedmrs_rows():
    """Section 5.1, and the defaults of the released code."""
    named = {"dir0.1": "dirichlet0.1", "dir0.5": "dirichlet0.5", "dir1.0": "dirichlet1", "iid": "iid"}
    for name in FEDMR:
        text, code = RECIPES[name](), RECIPES[f"{name}-released"]()
        config, local = text.config, text.config.local
        data, model, *spread = name.split("-")[1:]
        settings = (local.lr, local.momentum, local.batch_size, local.epochs, config.rounds)
        assert settings == (0.01, 0.9, 50, 5, 500)
        assert (text.algorithms, config.clients.cohort()) == (fedmr.METHODS, 18 if data == "femnist" else 10)
        for one in (text, code):
            assert one.options["fedmr"].stage1_rounds == (0 if model == "cnn" else 100)
        assert config.data.spread() == (named[spread[0]] if spread else "natural")
        assert code.config.local.momentum == 0.5
        assert (code.options["fedmr"].unit, code.options["fedmut"].unit) == ("tensor", "tensor")
        assert code.options["fedexp"].eps == (1.8 if data == "femnist" else 1)
        assert code.config.model.name == ("lenet" if model == "cnn" and data != "femnist" else config.model.name)


@pytest.mark.parametrize("name", some([*FEDMR[::4], FEDMR[-1]], [FEDMR[-1]]))
def test_recipes__fedmrs_models_take_their_images(name):
    config = RECIPES[name]().config
    padded = blank(config.data.dataset).pad(config.data.pad)
    net = create(torch.Generator(), model_spec(config.replace(width=0.1), padded))
    assert net.eval()(padded.normalise(padded.x)).shape == (2, padded.classes)


def test_recipes__the_papers_numbers():
    """Some that the papers' texts name, corners of the tables, and sums, so that no digit is mistyped."""
    table = fedmr.NUMBERS["cifar10", "resnet20", "dir0.1"]  # Table 1
    assert (table["fedmr"], table["fedmut"], table["fedavg"]) == ("59.20±1.22", "50.75±1.85", "42.14±3.91")
    assert sum(float(one.split("±")[0]) for row in fedmr.NUMBERS.values() for one in row.values()) == pytest.approx(
        12389.52
    )
    told = {f"{data}-{split}": dict(zip(femam.METHODS, numbers)) for data, split, numbers in femam.rows()}
    assert told["cifar100-clusters30"]["local"] == ("22.81±0.11", "13.80±0.33")  # Tables C.2 to C.4
    assert told["tiny-clusters140"]["fedprox"] == ("30.28±0.15", "22.16±0.14")
    assert told["cifar100-levels3-6-11"]["pfedme"] == ("51.85±0.17", "44.10±0.41")
    values = {
        name: {method: [float(one.split("±")[0]) for one in pair] for method, pair in row.items()}
        for name, row in told.items()
    }
    assert sum(sum(pair) for row in values.values() for pair in row.values()) == pytest.approx(8155.37)
    for name, row in values.items():  # appendix C.5
        assert max(row, key=lambda method: row[method][0]) == ("fedprox" if "iid" in name else "femam")
        place = {"c": "C.2", "l": "C.4"}.get(name.split("-")[1][0], "C.3")
        said = f"Table {place}: .*; the paper has FeMAM at {re.escape(told[name]['femam'][0])}%"
        assert re.search(said, describe(RECIPES[f"femam-{name}"]))
    assert fedfa.RIVALS == {  # section 5.3.1
        "depth": ["FlexiFed", "1.00-1.04", "0.98-1.02", "1.00-1.20", "1.22-2.09", "2.21-3.31", "1.21-1.74"],
        "width": ["HeteroFL", "1.01-1.16", "0.99-1.13", "1.00-1.16", "1.07-1.47", "0.89-2.37", "1.11-1.22"],
        "both": ["NeFL", "1.00-1.02", "0.99-1.06", "0.95-1.06", "1.01-2.11", "1.30-2.65", "1.23-1.63"],
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", some(SPLITS, ["cifar100-clusters30", "cifar100-levels2-5-9", "tiny-clusters50", "tiny-dir0.1"])
)
def test_recipes__femams_settings_are_the_papers_and_the_samples_can_be_dealt_out(name):
    """On as many labels as the pooled data sets have: who gets how much, of how many classes, in which clusters."""
    experiment, (counts, classes) = RECIPES[f"femam-{name}"](), SPLITS[name]
    config, options, data = experiment.config, experiment.options, name.split("-")[0]
    held_out = (config.data.local_valid, config.data.local_test)
    assert (config.clients.cohort(), config.local.epochs, config.rounds, len(experiment.seeds)) == (50, 2, 700, 4)
    assert (config.local.lr, config.local.momentum, config.local.batch_size) == (0.01, 0, 32)
    assert (options["fedprox"].mu, options["ditto"].lam) == (0.1, 0.1)
    assert (options["pfedme"].lam, options["pfedme"].mu) == (0.1, 0.01)
    assert (config.data.pool_test_set, config.model.name) == (True, "resnet9")
    assert (options["femam"].share_gradients, options["femam"].window) == (True, 50)
    labels = torch.arange(sum(SIZES[data])) % CLASSES[data]
    pooled = Dataset(data, torch.empty(0), labels, torch.empty(0), labels[:0], CLASSES[data])
    for seed in experiment.seeds:
        parts, structure = config.data.deal(pooled, 50, Rng(seed).numpy("partition"))
        splits = hold_out(parts, *held_out, Rng(seed).numpy("hold-out"))
        held = (splits.train, splits.valid, splits.test)
        assert all(abs(len(part.samples) - size) <= 12 for part, size in zip(held, SIZES[data]))
        assert int(splits.valid.sizes.min()) >= 30
        assert sum(part.samples.numel() for part in held) == len(labels)  # none is left over
        known = [len(labels[part].unique()) for part in parts]
        if counts:
            assert set(known) == {classes}
            assert [len(level.unique()) for level in structure] == list(counts)
        elif config.data.partition.name == "iid":
            assert min(known) >= 0.98 * CLASSES[data]
        else:
            assert min(known) <= CLASSES[data] / 3  # very different mixtures


def test_recipes__each_dirichlet_split_is_that_of_its_paper_or_code():
    """Hsu et al.'s mixtures for 100 clients of 500 images; by class what FedMR's and others' released code has."""
    labels = torch.arange(50_000) % 10
    data = Dataset("cifar10", torch.empty(0), labels, torch.empty(0), labels[:0], 10)
    mixed = ("fedavgm", "fedadagrad", "fedadam", "fedyogi", "scaffold", "feddyn")
    for method in mixed:
        settings = RECIPES[f"{method}-cifar10"]().config.data
        assert settings.spread().startswith("dirichlet_mixture0.")
        parts = settings.deal(data, 100, Rng(0).numpy("partition")).parts
        assert len(parts) == 100
        assert parts.sizes.max() - parts.sizes.min() <= 1
    for name in ("moon-cifar10", "fednova-cifar10", "fedmr-cifar10-cnn-dir0.1", "femam-cifar100-dir0.1"):
        assert RECIPES[name]().config.data.partition.name == "dirichlet"


def test_recipes__femams_released_code_differs_by_these_flags():
    flags = "--femam.combine mean --femam.start global --femam.prox 0.02 --femam.prox-all-levels "
    flags += "--femam.clustering kmeans --femam.compare classifier --femam.no-share-gradients"
    released = RECIPES["femam-tiny-iid-released"]()
    assert parse(["femam-tiny-iid", *flags.split()], RECIPES).experiment.runs() == released.as_read().runs()
    assert released.options["femam"].start != RECIPES["femam-tiny-iid"]().options["femam"].start


def test_recipes__fedfas_settings_of_images():
    """A reconstruction, after HeteroFL's released code."""
    for name, (_, _, mode, spread) in ROWS.items():
        config, local = RECIPES[name]().config, RECIPES[name]().config.local
        assert RECIPES[name]().algorithms == (RIVAL[mode], "fedfa")
        assert (config.clients.number, config.clients.cohort(), local.epochs, local.batch_size) == (100, 10, 5, 10)
        assert (local.lr, local.momentum, local.weight_decay, local.clip) == (0.1, 0.9, 5e-4, 1)
        assert factors(config, *(config.rounds * share // 100 + 1 for share in (0, 49, 50, 75))) == [1, 1, 0.1, 0.01]
        expected = ("iid-unequal", False, 400) if spread == "iid" else ("shards0.2", True, 800)
        assert (config.data.spread(), local.masked_loss, config.rounds) == expected
        assert config.model.architectures.widths == ((1.0,) if mode == "depth" else (0.5, 0.75, 1.0))
        assert bool(config.model.architectures.depths) == (mode != "width")
        assert space_of(config).largest == config.model.spec(config.data)


@pytest.mark.parametrize("name", some(TEXTS, ["fedfa-wikitext2-both"]))
def test_recipes__fedfas_settings_of_text(name):
    config = RECIPES[name]().config
    assert RECIPES[name]().algorithms == (RIVAL[TEXTS[name]], "fedfa")
    words = torch.zeros(2, 64, dtype=torch.int32)
    spec = model_spec(config, Dataset("words", words, words.long(), words, words.long(), 33_278))
    assert (config.data.text.vocabulary, spec.tokens, spec.depth, spec.dropout, spec.num_classes) == (
        0,
        64,
        (4,),
        0.2,
        33_278,
    )
    assert factors(config, 50, 51, 100, 101) == [1, 0.1, 0.1, 0.01]
    model = spec.build(device="meta")
    assert model.embedding.token.weight.shape == (33_278, 256)
    assert model.section1[0].fc1.weight.shape == (512, 256)
    if TEXTS[name] == "both":
        check_candidates(config, spec)


BOTH = [name for name in ROWS if name.endswith("both-iid")]


@pytest.mark.parametrize("name", some(BOTH, BOTH[::3]))
def test_recipes__fedfas_models_take_their_images(name):
    """The full one and the smallest, with the 10 images of a step, on the meta device."""
    data, config = ROWS[name][0], RECIPES[name]().config
    spec = model_spec(config, blank(data))
    for one in (spec, config.model.architectures.announce(spec).smallest):
        assert one.build(device="meta")(one.example(10, device="meta")).shape == (10, IMAGES[data][2])
    if data == "cifar10":  # the same for all data
        check_candidates(config, spec)


def check_candidates(config, full):
    """The largest is the model itself, and the smallest a part of it that stands for all the blocks that it lacks."""
    space = config.model.architectures.announce(full)
    assert len(set(space)) == 3 * len(config.model.architectures.depths)
    assert space.largest == full
    plan = plan_within(full.build(device="meta"), space.smallest.build(device="meta"), "corner")
    written = {source.name for sources in plan.entries.values() for source in sources}
    assert written == set(plan.shapes)
    assert all(few >= min(2, many) for few, many in zip(space.smallest.depth, full.depth))


def test_recipes__heterofls_and_nefls_own():
    config = RECIPES["heterofl-cifar10"]().config
    assert factors(config, 150, 151, 250, 251) == pytest.approx([1, 0.1, 0.1, 0.01])
    space = space_of(config)
    assert [(spec.width[0], spec.depth) for spec in space] == [(2.0**-n, (2, 2, 2, 2)) for n in range(5)]
    config = RECIPES["nefl-cifar10"]().config
    assert [width**2 for width in config.model.architectures.widths] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1])
    assert factors(config, 250, 251, 375, 376) == pytest.approx([1, 0.1, 0.1, 0.01])


def test_recipes__flowers_heterofl_and_fjord():
    config = RECIPES["heterofl-cifar10-a-e"]().config
    assert (config.clients.cohort(), config.local.epochs, config.rounds, config.model.norm) == (
        100,
        5,
        400,
        "static_batch",
    )
    assert factors(config, 150, 151, 250, 251) == pytest.approx([1, 0.1, 0.1, 0.01])
    space = space_of(config)
    assert [round(spec.count(32).parameters / 1000, 2) for spec in (space.largest, space.smallest)] == [11172.17, 44.51]
    config = RECIPES["fjord-cifar10"]().config
    assert (config.clients.cohort(), config.local.epochs, config.rounds, config.local.batch_size) == (10, 1, 500, 32)
    assert RECIPES["fjord-cifar10"]().options["fjord"].widths == config.model.architectures.widths


def test_recipes__depthfls_own():
    config = RECIPES["depthfl-cifar100"]().config
    assert (config.clients.cohort(), config.local.epochs, config.rounds, config.local.batch_size) == (10, 5, 1000, 50)
    assert factors(config, 1, 2, 3) == pytest.approx([1, 0.998, 0.998**2])
    assert [sum(map(bool, spec.depth)) for spec in space_of(config)] == [1, 2, 3, 4]


def test_recipes__scalefls_own():
    config = RECIPES["scalefl-cifar10"]().config
    assert (config.clients.cohort(), config.local.epochs, config.local.batch_size) == (10, 5, 16)
    assert factors(config, 100, 101, 200, 201) == pytest.approx([1, 0.1, 0.1, 0.01])
    assert RECIPES["scalefl-cifar10"]().options["scalefl"].start == config.rounds // 4 + 1
    full, choice = config.model.spec(config.data), config.model.architectures
    levels = [full.scale(width, depth) for width, depth in zip(choice.widths, choice.blocks())]
    assert [sum(spec.depth) for spec in levels] == [30, 38, 46, 54]
    assert [max(spec.width) for spec in levels] == [0.7, 0.7, 0.75, 1]
    space = space_of(config)
    assert all(level in space for level in levels)


def test_recipes__help_on_a_recipe_names_the_command_that_has_it(capsys):
    with pytest.raises(SystemExit):
        command.main(["femam-fashion-mnist", "--help"])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: python -m benchmarks.papers femam-fashion-mnist ")
    assert "python -m fl.run" not in printed
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert capsys.readouterr().out.startswith("usage: python -m fl.run ")
