"""A user's program, whose types mypy checks from another folder: what py.typed promises. Nothing calls it."""

from typing import assert_type

import torch
from torch import nn

import fl
import surgery
import zoo


def use() -> None:
    net = zoo.create("resnet20", width=0.5)
    assert_type(net, nn.Module)
    small, plan = surgery.narrow(net, 0.5, torch.randn(1, 3, 32, 32))
    assert_type(small, nn.Module)
    assert_type(plan, surgery.Plan)
    assert_type(surgery.cosine([net.state_dict()], [net.state_dict()]), torch.Tensor)
    surgery.narrow(net, "half")  # type: ignore[arg-type]

    summary = fl.simulate(fl.Config(), "runs/mine")
    assert_type(summary.final["accuracy"], float)
    assert_type(fl.load_model("runs/mine"), nn.Module)
    fl.simulate("digits", "runs/mine")  # type: ignore[arg-type]
