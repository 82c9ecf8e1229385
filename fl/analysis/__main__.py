"""Measurements of trained models of different size: `python -m fl.analysis similarity|scales RUN...`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from torch import nn

from fl import models
from fl.analysis.similarity import SectionSimilarity, block_similarity
from fl.analysis.weights import Compared, initial_model, measure, read, scale_table, similarity_table
from fl.base.console import guarded, program
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.settings import Depths, Rates
from fl.figures.models import heat_maps, histograms
from fl.figures.style import check_new, save
from fl.models.fleet import make_example
from fl.runs import checkpoint
from fl.runs.assembly import pick_device
from fl.runs.folder import load_model
from fl.settings import Config
from fl.settings.help import HELP, command, show
from zoo import Spec


@dataclass(frozen=True)
class Similarity:
    """Print and draw how alike the blocks of each section are: before and after training of runs, untrained of --model.

    Values are from -1 to 1: Pearson correlations of weight maps, which are matched one to one, as are filters (FedFA,
    appendix 0.B). Random weights score far above 0 already, and more so in wide layers. Two 3x3 convolutions of 256
    channels take some seconds on a CPU core, and of 512 channels minutes: wide and deep models need a GPU.
    """

    folders: tyro.conf.Positional[tuple[Path, ...]] = ()
    """run folders"""
    model: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """also this model, with random weights: one of the zoo, timm:NAME or torchvision:NAME"""
    width: Rates = (1.0,)
    """of --model: rates of the hidden widths, one for all or one for each section"""
    depth: Depths = ()
    """of --model: blocks of the sections, one number for all or one for each"""
    seed: int = 0
    """of --model's weights"""
    first: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """compare the first block of each section as well, if its shapes agree"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("similarity.png")
    """the figure; must be new"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU if there is one"""

    def run(self) -> int:
        """Measure, print and draw."""
        if not self.folders and self.model is None:
            raise FLError("give run folders, or an untrained --model")
        if self.model is None and (self.width, self.depth, self.seed) != ((1.0,), (), 0):
            raise FLError("--width, --depth and --seed are for --model: give one, or leave them out")
        if not 0 <= self.seed < 2**32:
            raise FLError(f"--seed must be at least 0 and below 2^32, got {self.seed}")
        device = pick_device(self.device)
        models_of = {folder: (initial_model(folder), load_model(folder)) for folder in self.folders}
        check_new(self.out)
        found = []
        for folder, nets in models_of.items():
            spec, _ = checkpoint.read_model(folder)
            found.append(Compared(f"{folder} ({spec.name})", *(self._measure(net.to(device), spec) for net in nets)))
        if self.model is not None:
            spec = Config(model=self.model, width=self.width, depth=self.depth).spec()
            net = models.create(Rng(self.seed).torch("weights"), spec)
            found.append(Compared(f"{self.model}, untrained", self._measure(net.to(device), spec)))
        save(heat_maps(found), self.out)
        print("\n\n".join(map(similarity_table, found)), f"figure: {self.out}", sep="\n\n")
        return 0

    def _measure(self, net: nn.Module, spec: Spec) -> list[SectionSimilarity]:
        """Compare the blocks of each section."""
        return block_similarity(net, first=self.first, example=make_example(net, spec))


@dataclass(frozen=True)
class Scales:
    """Print how far models of one family are from the smallest of them, and draw how their weights are distributed.

    Magnitude: the mean L1 norm of the smallest model's weight maps (kernels of one filter and input channel), averaged
    over its convolutions. Distance: the same for the difference between its weights and a larger model's leading
    channels in its first blocks. Ratio: distance over magnitude.
    """

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """run folders, each with another width or depth of one model"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("scales.png")
    """the figure; must be new"""

    def run(self) -> int:
        """Measure, print and draw."""
        members = read(self.folders)
        check_new(self.out)
        variation = measure(members)
        save(histograms(members), self.out)
        print(scale_table(members, variation), f"figure: {self.out}", sep="\n\n")
        return 0


KINDS = {"similarity": Similarity, "scales": Scales}


def run(argv: list[str]) -> int:
    """Carry out a measurement, which the first argument names."""
    name, *rest = argv or ["--help"]
    if name in HELP:
        lines = {kind: KINDS[kind].__doc__.partition("\n\n")[0] for kind in KINDS}
        after = f"`{program('analysis')} similarity --help` says more about one of them."
        show("analysis", f"{'|'.join(KINDS)} RUN ...", __doc__.split(":")[0], {"measurements": lines}, after)
    if name not in KINDS:
        raise FLError(f"there is no measurement {name!r}: give one of {', '.join(KINDS)}")
    return command(KINDS[name], f"analysis {name}", rest).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 2 for what cannot be done, 130 on Ctrl-C."""
    return guarded(lambda: run(list(sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
