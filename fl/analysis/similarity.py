"""How alike the residual blocks of models are, before and after training (FedFA, appendix 0.B, Tables 7-9)."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from fl.base.rng import Rng
from fl.base.tables import aligned
from fl.config import Config
from fl.models.init import maker
from fl.runs import checkpoint
from fl.runs.folder import load_initial_weights
from surgery import SectionSimilarity


class Compared(NamedTuple):
    """How alike a model's blocks are untrained, and trained if it is a run's."""

    title: str
    before: list[SectionSimilarity]
    after: list[SectionSimilarity] | None = None


def initial_model(folder: Path) -> nn.Module:
    """The model that a run began with, made again from its seed and the weights of its --init; on the CPU."""
    spec, _ = checkpoint.read_model(folder)
    config = Config.read(folder)
    return maker(spec, load_initial_weights(folder, config))(Rng(config.seeds[0]).torch("weights"))


def table(compared: Compared) -> str:
    """A line for each convolution of each section: the mean over pairs of blocks, untrained, trained, and the change.

    >>> layers = {"conv1.weight": torch.tensor([[1.0, 0.5], [0.5, 1.0]])}
    >>> print(table(Compared("a model", [SectionSimilarity("section1", ("section1.1", "section1.2"), layers)])))
    a model
    section   convolution    pairs   untrained
    section1  conv1              1      0.5000
              all                1      0.5000
    """
    columns = ["untrained"] + (["trained", "change"] if compared.after else [])
    lines = [["section", "convolution", "pairs", *columns]]
    for at, before in enumerate(compared.before):
        upper = torch.triu_indices(len(before.blocks), len(before.blocks), 1)
        pairs = {layer: int((~matrix[*upper].isnan()).sum()) for layer, matrix in before.layers.items()}
        pairs |= {None: sum(pairs.values())}
        for number, layer in enumerate([*before.layers, None]):
            values = [before.mean(layer)] + ([compared.after[at].mean(layer)] if compared.after else [])
            cells = [f"{value:.4f}" for value in values]
            cells += [f"{values[1] - values[0]:+.4f}"] if compared.after else []
            name = before.name if number == 0 else ""
            lines.append([name, _short(layer) if layer else "all", str(pairs[layer]), *cells])
    widths = [max(len(line[at]) for line in lines) + 2 for at in (0, 1)]
    return f"{compared.title}\n{aligned(lines, [*widths, 7, *[12] * len(columns)], left=2)}"


def _short(layer: str) -> str:
    return layer.removesuffix(".weight")
