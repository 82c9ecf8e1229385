"""Measure trained models of different size: `python -m benchmarks.papers.models similarity|scales RUN...`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from benchmarks.papers.models.figures import heat_maps, histograms
from benchmarks.papers.models.similarity import SectionSimilarity, block_similarity
from benchmarks.papers.models.weights import Compared, initial_model, measure, read, scale_table, similarity_table
from fl import models
from fl.base.console import guard
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.figures.style import check_new, save
from fl.models.fleet import make_example
from fl.runs import checkpoint
from fl.runs.assembly import pick_device
from fl.runs.folder import load_model
from fl.settings.model import ModelSettings
from zoo import Spec


def similarity(options: argparse.Namespace) -> int:
    """Print and draw how alike the blocks of each section are: before and after training of runs, untrained of --model.

    Values are from -1 to 1: Pearson correlations of weight maps, which are matched one to one, as are filters (FedFA,
    appendix 0.B). Random weights score far above 0 already, and more so in wide layers. Two 3x3 convolutions of 256
    channels take some seconds on a CPU core, and of 512 channels minutes: wide and deep models need a GPU.
    """
    if not options.folders and options.model is None:
        raise FLError("give run folders, or an untrained --model")
    device = pick_device(options.device)
    models_of = {folder: (initial_model(folder), load_model(folder)) for folder in options.folders}
    check_new(options.out)

    def compare(net: nn.Module, spec: Spec) -> list[SectionSimilarity]:
        net = net.to(device)
        return block_similarity(net, first=options.first, example=make_example(net, spec))

    compared = []
    for folder, nets in models_of.items():
        spec, _ = checkpoint.read_model(folder)
        compared.append(Compared(f"{folder} ({spec.name})", *(compare(net, spec) for net in nets)))
    if options.model is not None:
        spec = ModelSettings(options.model, options.width, options.depth).spec()
        net = models.create(Rng(options.seed).torch("weights"), spec)
        compared.append(Compared(f"{options.model}, untrained", compare(net, spec)))
    save(heat_maps(compared), options.out)
    print("\n\n".join(map(similarity_table, compared)), f"figure: {options.out}", sep="\n\n")
    return 0


def scales(options: argparse.Namespace) -> int:
    """Print how far models of one family are from the smallest of them, and draw how their weights are distributed.

    Magnitude: the mean L1 norm of the smallest model's weight maps (kernels of one filter and input channel), averaged
    over its convolutions. Distance: the same for the difference between its weights and a larger model's leading
    channels in its first blocks. Ratio: distance over magnitude.
    """
    members = read(options.folders)
    check_new(options.out)
    variation = measure(members)
    save(histograms(members), options.out)
    print(scale_table(members, variation), f"figure: {options.out}", sep="\n\n")
    return 0


def numbers(kind: Callable) -> Callable[[str], tuple]:
    """Return a parser of numbers with commas between them.

    >>> numbers(float)("0.5,1")
    (0.5, 1.0)
    """

    def parse(text: str) -> tuple:
        return tuple(map(kind, text.split(",")))

    return parse


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.papers.models", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="similarity|scales")
    for call, figure in ((similarity, "similarity.png"), (scales, "scales.png")):
        command = commands.add_parser(
            call.__name__, help=call.__doc__.splitlines()[0], description=call.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.set_defaults(call=call)
        command.add_argument("folders", nargs="*", type=Path, metavar="RUN", help="run folders")
        command.add_argument("--out", type=Path, default=Path(figure), help="the figure; must be new (%(default)s)")
        if call is similarity:
            command.add_argument("--model", help="also this model, with random weights: one of the zoo, timm:NAME, ...")
            command.add_argument("--width", type=numbers(float), default=(1.0,), help="of --model, one or by section")
            command.add_argument("--depth", type=numbers(int), default=(), help="of --model, one or by section")
            command.add_argument("--seed", type=int, default=0, help="of --model's weights")
            command.add_argument("--first", action="store_true", help="compare the first block of each section as well")
            command.add_argument("--device", default="auto", help="cpu, cuda, ...; auto takes a GPU if there is one")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 2 for what cannot be done, 130 on Ctrl-C."""
    options = arguments(argv)
    with guard() as ended:
        ended.code = options.call(options)
    return ended.code


if __name__ == "__main__":
    sys.exit(main())
