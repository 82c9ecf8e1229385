import math

import numpy as np
import pytest
import torch
from refusals import fl_refused
from torch import nn

import zoo
from benchmarks.papers.models import similarity
from benchmarks.papers.models.similarity import block_similarity, convolutions, filter_similarity
from fl.base.errors import FLError
from surgery import state
from tests.surgery.test_order import Branches, Row, X, part


def matched(table):
    """The mean of a matrix under the greedy matching, entry by entry."""
    free, chosen = list(range(len(table[0]))), []
    for row in table:
        column = max(free, key=lambda at: row[at])  # the first of equal ones
        free.remove(column)
        chosen.append(row[column])
    return sum(chosen) / len(chosen)


def naive(a, b):
    """The paper's four loops, with NumPy's correlation of two maps."""

    def maps(filter):
        return [m.flatten() for m in filter] if filter[0].numel() > 1 else [filter.flatten()]

    def pearson(x, y):
        if x.max() == x.min() or y.max() == y.min():
            return 0.0
        return np.corrcoef(x.double(), y.double())[0, 1]

    return matched([[matched([[pearson(x, y) for y in maps(g)] for x in maps(f)]) for g in b] for f in a])


def weights(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    "shape", [(5, 4, 3, 3), (4, 6, 2), (3, 2, 2, 2, 2), (6, 1, 3, 3), (5, 7, 1, 1), (6, 5), (1, 1, 3, 3), (3, 1)]
)
def test_similarity__it_is_the_papers_loops(shape):
    a, b = weights(*shape)
    assert filter_similarity(a, b) == pytest.approx(naive(a, b), abs=1e-12)
    assert filter_similarity(a.float(), b.float()) == pytest.approx(naive(a.float(), b.float()), abs=1e-6)


def test_similarity__constant_maps_correlate_with_nothing():
    a, b = weights(4, 3, 3, 3)
    a[1, 2], b[0, 0], b[3] = 0.1, 0, 7
    assert filter_similarity(a, b) == pytest.approx(naive(a, b), abs=1e-12)
    assert filter_similarity(torch.full((2, 2, 3, 3), 0.1), b[:2, :2].float()) == 0
    near = 1e4 + 1e-2 * a  # far from 0, and still no constant
    assert filter_similarity(near, near) == pytest.approx(1 - 1 / 12, abs=1e-9)  # but for that one map


def test_similarity__tiles_change_nothing(monkeypatch):
    a, b = weights(7, 3, 3, 3)
    whole = filter_similarity(a, b)
    for tile in (1, 3 * 4, 3 * 9):  # tiles of one filter, of 2x2 and of 3x3
        monkeypatch.setattr(similarity, "_TILE", tile)
        assert filter_similarity(a, b) == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (torch.ones(2, 2, 3), torch.ones(2, 3, 3), "one shape"),
        (torch.ones(4), torch.ones(4), "one shape"),
        (torch.ones(0, 2, 3), torch.ones(0, 2, 3), "one shape"),
        (torch.ones(2, 2, 3).long(), torch.ones(2, 2, 3).long(), "int64"),
        (torch.ones(2, 2, 3, device="meta"), torch.ones(2, 2, 3, device="meta"), "meta"),
        (torch.eye(3)[None], torch.eye(3)[None] * math.nan, "NaN"),
        (torch.eye(3)[None].log(), torch.eye(3)[None], "NaN"),
    ],
)
def test_similarity__what_has_no_similarity_is_refused(a, b, reason):
    with pytest.raises(FLError, match=reason):
        filter_similarity(a, b)


def test_similarity__blocks_of_a_section_are_compared_convolution_by_convolution():
    generator = torch.Generator().manual_seed(0)
    net = zoo.create("preresnet20", generator, width=0.25, depth=(4, 2, 3))
    one, three = block_similarity(net)  # section2 has a single block after its first
    assert (one.name, three.name) == ("section1", "section3")
    assert one.blocks == ("section1.1", "section1.2", "section1.3")
    assert list(one.layers) == ["conv1.weight", "conv2.weight"]
    for section in (one, three):
        for name, matrix in section.layers.items():
            for i, first in enumerate(section.blocks):
                for j, second in enumerate(section.blocks):
                    pair = sorted([(i, first), (j, second)])
                    modules = [net.get_submodule(f"{block}.{name.removesuffix('.weight')}") for _, block in pair]
                    expected = filter_similarity(*(m.weight for m in modules)) if i != j else 1
                    assert matrix[i, j] == expected
    pairs = [one.layers["conv1.weight"][i, j] for i, j in ((0, 1), (0, 2), (1, 2))]
    assert one.mean("conv1.weight") == pytest.approx(sum(pairs) / 3)
    assert one.mean() == pytest.approx((one.mean("conv1.weight") + one.mean("conv2.weight")) / 2)
    assert torch.allclose(one.matrix, (one.layers["conv1.weight"] + one.layers["conv2.weight"]) / 2)
    of_state = block_similarity(state(net))
    assert [section.mean() for section in of_state] == [one.mean(), three.mean()]


def test_similarity__first_blocks_are_compared_where_they_fit():
    net = zoo.create("preresnet20", torch.Generator().manual_seed(0), width=0.25, depth=2)
    one, two, _ = block_similarity(net, first=True)
    assert not one.layers["conv1.weight"].isnan().any()
    assert list(two.layers) == ["conv2.weight"]  # conv1 of the first block has other channels, and shortcut is alone
    assert two.mean() == two.matrix[0, 1] == two.layers["conv2.weight"][0, 1]
    with fl_refused("unsupported"):
        block_similarity(net)


def test_similarity__models_without_convolutions_are_compared_by_their_linear_layers():
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.TransformerEncoder(block, 3, enable_nested_tensor=False)
    (section,) = block_similarity(net)
    assert len(section.layers) == 4
    assert section.mean() == pytest.approx(1, abs=1e-6)  # the layers are copies
    assert convolutions({"pos_weight": torch.ones(2, 2, 2), "a.bias": torch.ones(2, 2, 2)}) == ["pos_weight"]


@pytest.mark.gpu
def test_similarity__the_gpu_agrees():
    a, b = weights(16, 12, 3, 3, dtype=torch.float32)
    assert filter_similarity(a.cuda(), b.cuda()) == pytest.approx(filter_similarity(a, b), abs=1e-5)


def test_similarity__modules_beside_each_other_are_no_section_where_an_example_shows_them():
    net = nn.Sequential(Row(part(), part(), part()), Branches(sum))
    assert [found.name for found in block_similarity(net)] == ["0.blocks", "1.branches"]
    assert [found.name for found in block_similarity(net, example=X)] == ["0.blocks"]
