"""The methods of `fl` with a Vision Transformer: on random images, and each from the command line."""

import math

import oracles
import pytest
import torch
from fl_flags import OF_METHOD, TINY
from fleets import IMAGES, assert_close, fleet_federation, shapes, train_each
from ranks import NEED_ADAPTERS

import surgery
from fl import run as cli
from fl.algorithms import ALGORITHMS
from fl.algorithms.fedfa import METHOD as fedfa
from fl.algorithms.fedfa import FedFAOptions
from fl.base.rng import Rng
from fl.runs.metrics import read
from zoo import Spec

COHORT = [2, 0, 3, 1]
BASE = Spec("vit_tiny", **IMAGES, width=0.06, depth=3)


def mixed(widths=(1.0, 0.5, 0.5, 0.75)):
    """Four clients: the whole model, the smallest, and two in between."""
    return fleet_federation(BASE, list(zip(widths, (3, 1, 3, 2))))


@pytest.mark.slow
def test_attention__a_round_of_fedfa_is_the_paper_written_out():
    """Grafted and scaled: positions, class tokens and norms, too."""
    fed, rng = mixed(), Rng(0, 1)
    algorithm = fedfa(fed, FedFAOptions())
    old = algorithm.init()["global"]
    starts = [{key: oracles.corner(old[key], shape) for key, shape in shapes(fed, k).items()} for k in COHORT]
    states, sizes = train_each(fed, starts, COHORT, rng)
    after, _ = algorithm.round({"global": old}, COHORT, rng)
    assert_close(after["global"], oracles.fedfa(old, states, sizes))


def test_attention__recombination_moves_whole_layers():
    """Every layer of every model is in one of the new ones, with all of its tensors from the same model."""
    models = [BASE.build(torch.Generator().manual_seed(seed)) for seed in range(3)]
    with torch.no_grad():  # norms begin alike, and biases
        for seed, model in enumerate(models):
            for p in model.parameters():
                p.fill_(seed)
    order = surgery.layers(models[0])
    pieces = surgery.segments(order)
    draws = surgery.permutations(len(pieces), 3, generator=torch.Generator().manual_seed(1))
    mixed = [surgery.state(net) for net in surgery.shuffle(models, segments=pieces, permutations=draws)]
    for layer in order:
        sources = [{int(state[key].flatten()[0]) for key in layer.tensors} for state in mixed]
        assert all(len(source) == 1 for source in sources), layer.name
        assert sorted(min(source) for source in sources) == [0, 1, 2]
    moved = {tuple(int(state[next(iter(layer.tensors))].flatten()[0]) for state in mixed) for layer in order}
    assert len(moved) > 1  # layers go their own ways


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in ALGORITHMS if name != "fjord"])
def test_attention__every_method_trains_it(tmp_path, method):
    flags = [*TINY, "--model", "vit_tiny", "--depth", "2", "--samples", "200", "--rounds", "2", "--algorithm", method]
    if ALGORITHMS[method].clients == "heterogeneous" and method not in NEED_ADAPTERS:
        flags += ["--architectures.choose", "cycle"]
        flags += [] if method == "fedrolex" else ["--architectures.depths", "1,2"]
        flags += [] if method in ("flexifed", "inclusivefl") else ["--architectures.widths", "0.5,1"]
    assert cli.main([*flags, *OF_METHOD.get(method, []), "--out", str(tmp_path)]) == 0
    (folder,) = tmp_path.iterdir()
    assert math.isfinite(read(folder / "metrics.csv")[-1]["loss"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--norm", "batch"], "vit_tiny takes no norm"),
        (["--stem", "imagenet"], "patches of 16 pixels do not fill a side of 8"),
    ],
)
def test_attention__what_the_command_line_refuses(tmp_path, capsys, flags, message):
    assert cli.main([*TINY, "--model", "vit_tiny", *flags, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
