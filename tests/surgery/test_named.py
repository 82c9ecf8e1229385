import pytest
import torch
import torchvision
from refusals import refused

from surgery.libraries import check_named, example_input, input_size, make_model


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
def test_named__models_are_made_with_the_arguments_of_the_library(name):
    model = make_model(name, num_classes=7).eval()
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 7)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet18", "give timm:NAME or torchvision:NAME"),
        ("tim:resnet18", "did you mean 'timm:resnet18'?"),
        ("timm:", "give timm:NAME or torchvision:NAME"),
        ("timm:resnet1", "timm has no model 'resnet1': did you mean timm:resnet"),
        ("torchvision:resnet17", "torchvision has no model 'resnet17': did you mean torchvision:resnet1"),
        ("torchvision:?", "torchvision has no model '?'"),
        ("timm:hf-hub:someone/resnet18", "timm has no model 'hf-hub:someone/resnet18'"),
    ],
)
def test_named__names_that_there_are_not_tell_what_there_is(name, message):
    with refused("name") as caught:
        check_named(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
def test_named__arguments_that_a_factory_refuses_are_named(name):
    with refused("argument") as caught:
        make_model(name, colour="red")
    assert "\n" not in str(caught.value)


def test_named__nothing_is_downloaded_for_models_with_a_backbone(monkeypatch):
    asked = []

    def download(url, *arguments, **options):
        asked.append(url)
        raise RuntimeError("no download here")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", download)
    with pytest.raises(RuntimeError, match="no download"):  # torchvision's own default does
        torchvision.models.get_model("lraspp_mobilenet_v3_large", weights=None)
    assert len(asked) == 1
    model = make_model("torchvision:lraspp_mobilenet_v3_large")
    assert len(asked) == 1
    assert sum(p.numel() for p in model.parameters()) > 3_000_000


@pytest.mark.parametrize(
    ("name", "arguments", "size"),
    [
        ("timm:resnet18", {}, (3, 224, 224)),
        ("timm:resnet18", {"in_chans": 1}, (1, 224, 224)),
        ("timm:test_vit", {}, (3, 160, 160)),
        ("timm:test_vit", {"img_size": 32}, (3, 32, 32)),
        ("timm:inception_v3", {}, (3, 299, 299)),
        ("torchvision:inception_v3", {}, (3, 299, 299)),
        ("torchvision:vit_b_16", {"image_size": 32}, (3, 32, 32)),
        ("torchvision:r3d_18", {}, (3, 16, 112, 112)),
    ],
)
def test_named__the_input_has_the_size_that_the_model_was_made_for(name, arguments, size):
    with torch.device("meta"):
        model = make_model(name, **arguments)
    assert input_size(model) == size
    assert example_input(model, batch=3).shape == (3, *size)
