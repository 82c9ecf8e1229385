"""Models that people have, at full size: all hidden widths halve, in one run of the narrow model.

On the meta device, where a model has shapes and no numbers.
"""

import pytest
import torch
import torchvision
from selection import some

from surgery import narrow, state
from surgery.width import check

IMAGE = {"vit_b_16": 224, "swin_t": 224}
LEFT = {"resnet50": 0.26, "vit_b_16": 0.26, "convnext_tiny": 0.26, "efficientnet_b0": 0.28, "swin_t": 0.26}
"""The share of parameters that is left, at most: first layers keep their inputs, and vectors halve."""


@pytest.mark.parametrize("name", some(LEFT, ["resnet50", "vit_b_16"]))
def test_narrow__one_run_halves_all_hidden_widths(name, monkeypatch):
    runs = []
    difference = check._Comparison.difference
    monkeypatch.setattr(check._Comparison, "difference", lambda *given: runs.append(1) or difference(*given))
    with torch.device("meta"):
        model = torchvision.models.get_model(name, num_classes=1).eval()
        image = torch.zeros(1, 3, IMAGE.get(name, 64), IMAGE.get(name, 64))
    small, _ = narrow(model, 0.5, image, strict=True)
    assert len(runs) == 1
    assert small(image).shape == (1, 1)
    before, after = (sum(tensor.numel() for tensor in state(one).values()) for one in (model, small))
    assert 0.25 < after / before < LEFT[name]
