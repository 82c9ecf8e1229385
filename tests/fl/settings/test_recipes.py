import re
from dataclasses import replace

import pytest
import torch
from fl_flags import TINY

from fl import run as cli
from fl.base.errors import FLError
from fl.data import Dataset, load
from fl.models import create
from fl.runs.assembly import model_spec
from fl.settings import Config
from fl.settings.recipes import RECIPES, describe, fedfa, fedmr, femam, overview

CLASSES = {"cifar10": 10, "cifar100": 100, "femnist": 62}
SHAPES = {"cifar10": (3, 32, 32), "cifar100": (3, 32, 32), "femnist": (1, 28, 28)}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_run_and_says_how(name):
    RECIPES[name]().check()
    assert f"python -m fl.run {name}\n" in describe(name) + "\n"


def test_there_is_one_for_every_row_of_table_1():
    assert len(fedmr.TABLE) == 27
    for data in ("cifar10", "cifar100"):
        for model in ("cnn", "resnet20", "vgg16"):
            for spread in ("dir0.1", "dir0.5", "dir1.0", "iid"):
                config = RECIPES[f"fedmr-{data}-{model}-{spread}"]()
                assert config.spread() == {"dir": f"dirichlet{spread[3:].removesuffix('.0')}", "iid": "iid"}[spread[:3]]
    for config in (make() for make in fedmr.TABLE.values()):
        assert config.algorithm == fedmr.METHODS
        assert (config.lr, config.momentum, config.batch_size, config.local_epochs) == (0.01, 0.9, 50, 5)
        assert config.cohort() == (18 if config.dataset == "femnist" else 10)
        assert config.fedmr.stage1_rounds == (0 if config.model == "cnn" else 100)


@pytest.mark.parametrize("name", fedmr.TABLE)
def test_their_models_take_their_images(name):
    """On the meta device's terms: the shapes of the data set, after padding."""
    config = RECIPES[name]()
    channels, side = SHAPES[config.dataset][0], SHAPES[config.dataset][1]
    images = torch.zeros(2, channels, side, side, dtype=torch.uint8)
    labels = torch.tensor([0, CLASSES[config.dataset] - 1])
    data = Dataset("zeros", images, labels, images, labels, CLASSES[config.dataset]).padded(config.pad)
    narrow = replace(config, width=(0.1,))
    model = create(torch.Generator(), model_spec(narrow, data))
    assert model.eval()(data.normalise(data.x)).shape == (2, data.classes)


def test_each_row_has_the_released_codes_defaults_too():
    assert [*fedmr.RELEASED] == [f"{name}-released" for name in fedmr.TABLE]
    assert [*femam.RELEASED] == [f"{name}-released" for name in femam.TABLE]
    for name in fedmr.TABLE:
        text, code = RECIPES[name](), RECIPES[f"{name}-released"]()
        assert (text.momentum, code.momentum, code.fedmr.unit, code.fedmut.unit) == (0.9, 0.5, "tensor", "tensor")
        assert code.fedmr.stage1_rounds == text.fedmr.stage1_rounds
        assert code.fedexp.eps == (1.8 if code.dataset == "femnist" else 1)
        assert code.model == ("lenet" if text.model == "cnn" and text.dataset != "femnist" else text.model)
    for name in femam.TABLE:
        assert replace(RECIPES[f"{name}-released"](), femam=RECIPES[name]().femam) == RECIPES[name]()


def test_the_numbers_are_told():
    """Two of the paper's that the text names, and the order of the columns."""
    text = describe("fedmr-cifar10-resnet20-dir0.1")
    assert "fedmr 59.20±1.22" in text
    assert "fedmut 50.75±1.85" in text
    assert "fedavg 42.14±3.91" in text
    for name in fedmr.TABLE:
        assert len(re.findall(r"(?:fed[a-z]+|clusamp) \d\d\.\d\d±\d\.\d\d", describe(name))) == 8
    assert "--dataset cifar100-coarse" in describe("fedmr-cifar100-cnn-iid")
    assert "--model lenet" in describe("fedmr-cifar10-cnn-iid")


def test_a_row_can_be_run_on_other_data(tmp_path):
    flags = [*TINY, "--dataset", "digits", "--rounds", "1", "--seeds", "0", "--algorithm", "fedmr,fedgen"]
    assert cli.main(["fedmr-cifar100-resnet20-dir0.1", *flags, "--out", str(tmp_path), "--name", "a"]) == 0
    config = Config.read(tmp_path / "a" / "fedgen-seed0")
    assert (config.fedgen.alpha, config.fedgen.beta) == (10.0, 1.0)
    assert "fedprox" not in (tmp_path / "a" / "fedgen-seed0" / "config.yaml").read_text()


def test_the_overview_names_all():
    tables = {*fedmr.OVERVIEW, *femam.OVERVIEW, *fedfa.OVERVIEW}
    rows = fedmr.TABLE | fedmr.RELEASED | femam.TABLE | femam.RELEASED | fedfa.TABLE
    assert overview().keys() - tables == RECIPES.keys() - rows.keys()
    text = str({*fedmr.OVERVIEW.items()})
    for word in {part for name in fedmr.TABLE for part in name.split("-")}:
        assert word in text  # every data set, model and spread of the table


def test_padding_repeats_the_edge():
    data = load("digits")
    padded = data.padded(3)
    assert padded.x.shape[-2:] == padded.test_x.shape[-2:] == (14, 14)
    assert torch.equal(padded.x[..., 3:-3, 3:-3], data.x)
    assert torch.equal(padded.x[..., 0, 3:-3], data.x[..., 0, :])
    assert torch.equal(padded.x[..., 3:-3, -1], data.x[..., :, -1])
    assert torch.equal(padded.x[..., 0, 0], data.x[..., 0, 0])
    assert data.padded(0) is data
    with pytest.raises(FLError, match="--pad must be 0 or more"):
        Config(pad=-1).check()
    with pytest.raises(FLError, match="--pad is for images"):
        Config(dataset="pydoc", model="transformer", partition="iid", pad=1).check()
