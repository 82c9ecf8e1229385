import copy
import pickle
from dataclasses import replace

import pytest
import torch
from fl_flags import TINY
from refusals import fl_refused
from selection import some

import fl
from fl import models
from fl import run as cli
from fl.base.errors import FLError
from fl.data.text import TextOptions
from fl.engine.draws import Drawing, Draws
from fl.models import custom_model
from fl.runs.assembly import build, model_spec
from fl.runs.metrics import read
from fl.settings import Config
from surgery import state

DIGITS = {"num_classes": 10, "in_channels": 1, "image_size": 8}
NAMES = ["timm:resnet18", "torchvision:resnet18"]
SECTIONS = "--model resnet20 --width 0.25,0.25,0.5 --depth 1,2,1 --norm static_batch"


def make(name, seed=0, **arguments):
    return models.create(torch.Generator().manual_seed(seed), models.make_spec(name, **{**DIGITS, **arguments}))


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_models__weights_are_a_function_of_the_generator_and_nothing_global_changes(name):
    before = torch.get_rng_state()
    one, same, other = (state(make(name, seed, width=0.25)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


@pytest.mark.parametrize(("name", "channels"), [("timm:resnet18", 1), ("torchvision:resnet18", 3)])
def test_models__channels_classes_and_width(name, channels):
    model = make(name, in_channels=channels, num_classes=7, width=0.5).eval()
    assert model(torch.zeros(2, channels, 8, 8)).shape == (2, 7)
    assert model.conv1.weight.shape == (32, channels, 7, 7)


def test_models__a_grey_image_does_what_three_equal_channels_would():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 1, 8, 8, generator=generator)
    grey, colour = make(NAMES[1]).eval(), make(NAMES[1], in_channels=3).eval()
    torch.testing.assert_close(grey(images), colour(images.expand(2, 3, 8, 8)))


@pytest.mark.parametrize(
    "name",
    some(
        ["vgg11", "efficientnetv2_cifar", "torchvision:mobilenet_v3_small", "timm:repvit_m0_9"],
        ["vgg11", "torchvision:mobilenet_v3_small"],
    ),
)
def test_models__keep_their_dropout_and_draw_from_their_own_stream(name):
    model = make(name, in_channels=3, image_size=32, width=0.25).train()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    drops = name != "timm:repvit_m0_9"  # has none
    before, outputs = torch.get_rng_state(), []
    for key in (1, 1, 2):
        with torch.no_grad(), Drawing(Draws(torch.tensor(key, dtype=torch.int32))):
            outputs.append(copy.deepcopy(model)(images))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2]) != drops
    assert models.make_spec("vgg11", 10, dropout=0.0).dropout == 0
    with fl_refused("unsupported", "--dropout", "0.1"):
        models.make_spec("cnn", 10, dropout=0.1)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resnet", {}, "unknown model 'resnet': did you mean resnet"),
        ("lenett", {}, "unknown model 'lenett': did you mean"),
        ("zzz", {}, "; --model takes timm:NAME, torchvision:NAME and my_module:MyNet, too"),
        ("transformer", {}, "--model transformer is made for text"),
        ("vgg11", {}, "vgg11: images of a VGG must be 32x32 or larger, got 8x8"),
        ("resnet20", {"depth": (1, 2)}, "resnet20 takes one depth, or one for each of 3 sections; got 2"),
        ("timm:resnet18", {"depth": (1, 2)}, "2 depths: give one for each section"),
        ("timm:resnet1", {}, "did you mean timm:resnet"),
        ("tim:resnet18", {}, "did you mean 'timm:resnet18'?"),
        ("timm:resnet18", {"width": 1.5}, "timm:resnet18 can only be made narrower, by a width of at most 1, got 1.5"),
        ("timm:resnet18", {"width": (2.0,)}, "can only be made narrower"),
        ("torchvision:squeezenet1_1", {"image_size": 64, "in_channels": 3, "depth": 1}, "has no sections of blocks"),
        ("timm:resnet18", {"norm": "group"}, "--norm group: timm:resnet18 brings its own norm layers"),
        ("timm:test_vit", {}, "--model timm:test_vit cannot take images of 1x8x8: "),
        ("torchvision:fcn_resnet50", {"in_channels": 3}, "torchvision:fcn_resnet50 is no image classifier"),
        ("torchvision:resnet18", {"in_channels": 2}, "takes 3 channels, not 2"),
    ],
)
def test_models__what_cannot_be_trained_is_one_line(name, arguments, message):
    with pytest.raises(FLError) as caught:
        make(name, **arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_models__settings_are_checked_before_anything_is_built():
    for settings in ({"model": "timm:resnet1"}, {"width": 2.0, "model": "timm:resnet18"}):
        with pytest.raises(FLError, match="resnet1"):
            Config.of(**settings).check()


def test_models__width_and_depth_may_be_single_numbers():
    config = Config.of(model="resnet20", width=0.5, depth=2)
    assert (config.model.width, config.model.depth) == ((0.5,), (2,))
    assert config.model.spec().depth == (2, 2, 2)
    assert Config.from_yaml(config.to_yaml()) == config
    assert Config.of(width=[0.5, 1.0, 1.0]).model.width == (0.5, 1.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    some(
        [f"--model {NAMES[0]} --backend vmap", f"--model {NAMES[1]} --backend loop --depth 1,2,1,1", SECTIONS],
        [SECTIONS],
    ),
)
def test_models__a_run_can_be_resumed_and_its_model_taken_out(tmp_path, flags):
    """Statistics of the static norm are in the checkpoint."""
    flags = [*TINY, *flags.split(), "--out", str(tmp_path), "--name", "a"]
    assert cli.main([*flags, "--rounds", "1"]) == 0
    folder = tmp_path / "a"
    assert cli.main(["--resume", str(folder), "--rounds", "2"]) == 0
    model, data = fl.load_model(folder), build(Config.read(folder))[0].data
    with torch.no_grad():  # of one image alone
        alone = torch.cat([model(data.normalise(x)) for x in data.test_x.split(1)])
    accuracy = (alone.argmax(1) == data.test_y).double().mean().item()
    assert accuracy == pytest.approx(read(folder / "metrics.csv")[-1]["accuracy"], abs=1e-9)


def test_models__width_and_depth_are_given_by_section():
    model = make("resnet20", width=(0.25, 0.25, 0.5), depth=(1, 2, 1))
    assert model.head.in_features == 32
    assert [len(model.section1), len(model.section2), len(model.section3)] == [1, 2, 1]
    model = make("timm:resnet18", depth=(1, 2, 1, 1), width=0.25).eval()
    assert [len(getattr(model, f"layer{i}")) for i in range(1, 5)] == [1, 2, 1, 1]
    assert model.fc.in_features == 128
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_models__a_model_of_text_is_made_for_the_length_of_the_sequences():
    text = TextOptions(vocabulary=50, length=16)
    config = Config.of(dataset="pydoc", partition="natural", model="transformer", text=text)
    data = config.load()
    assert model_spec(config, replace(data, x=data.x[:, :8])).tokens == 8


def test_models__a_user_s_model_is_as_it_was_after_its_classifier_was_looked_for():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    spec = custom_model.describe("given", lambda: net, Config().load(), 1.0, None)
    assert spec.classifier() == {"1.weight", "1.bias"}
    assert pickle.loads(pickle.dumps(net))  # which a hook that stayed would prevent


def test_models__what_exits_are_for():
    assert models.make_spec("resnet20", exits=True).exits
    assert models.make_spec("resnet20").exits is False
    with fl_refused("unsupported", "--exits"):
        models.make_spec("cnn", exits=True)
    with fl_refused("unsupported", "--exits"):
        models.make_spec("given", exits=True)
    with fl_refused("argument", "resnet20"):
        models.make_spec("resnet20", depth=(1, 1, 0))
