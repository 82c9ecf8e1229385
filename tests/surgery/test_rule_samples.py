"""Each rule on the samples of its operation: what shrinks, and that what is left computes what it should."""

import pytest
import torch
import torchvision  # noqa: F401, its operations
from refusals import refused
from rule_samples import APART, FREE, KIN, WHOLE
from selection import some
from symmetric import Made
from torch import nn

import surgery
from surgery.forward import tensors_in
from surgery.symmetry.permutation import trace_and_solve
from surgery.width import trace
from surgery.width.rules.registry import RULES, canonical
from surgery.width.solve import named_widths
from tests.surgery.test_narrow import assert_plan, assert_zero_oracle, randomized

LEFT = {name: left for table, left in ((FREE, 4), (WHOLE, 8)) for names in table for name in names.split()}
SAMPLES = {name: call for table in (FREE, WHOLE) for names, call in table.items() for name in names.split()}
EXAMPLE = torch.rand(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
# A matrix with repeated rows has another factor. (What is drawn along a width leaves that one whole.)
NOT_WIDENED = "_efficientzerotensor linalg_eig _linalg_svd _linalg_eigh"
WIDENED = (  # by default: widths of several factors, in groups, joined, summed along, whole, and some that cannot grow
    "channel_shuffle pixel_shuffle pixel_unshuffle im2col native_group_norm native_layer_norm bmm _cdist_forward eye "
    "var sum cat glu cumsum tril rand_like _linalg_svd"
)


def operation(name):
    space, _, bare = name.rpartition("::")
    found = getattr(getattr(torch.ops, space or "aten"), bare, None)
    return found or pytest.skip("this torch does not have it")


def network(name, looks=False):
    """Two linear layers, the operation, and a linear layer for each of its results; one that looks at numbers is not
    traced on the meta device, where operations may run as others."""
    call, called = SAMPLES[name], operation(name)

    def results(net, x):
        found = (t.double() for t in tensors_in(call(called, net.body(net.front(x)))))
        return [t for t in found if t.ndim]

    net = Made(None, front=nn.Linear(4, 6, bias=False), body=nn.Linear(6, 8))
    randomized(net.double())
    with torch.no_grad():
        heads = [nn.Linear(found.shape[-1], 3, bias=False) for found in results(net, EXAMPLE)]
    net.heads = randomized(nn.ModuleList(heads).double())

    def forward(net, x):
        scale = 1 if not looks or x.sum().item() else 2
        return torch.cat([head(y).flatten() for head, y in zip(net.heads, results(net, x))]) * scale

    net.function = forward
    return net.eval()


def halved(net, monkeypatch):
    """The network at half its widths and its plan, and the names of the operations that were seen meanwhile."""
    used, known = set(), trace.rule_for
    with monkeypatch.context() as patch:
        patch.setattr(trace, "rule_for", lambda func: used.add(canonical(func._schema.name)) or known(func))
        return *surgery.narrow(net, 0.5, EXAMPLE), used


ONE_OF_EACH = {(RULES[name].function, call): name for name, call in SAMPLES.items() if name in RULES}.values()


@pytest.mark.parametrize("name", some(SAMPLES, ONE_OF_EACH))
@torch.no_grad()
def test_rule_samples__a_rule(name, monkeypatch):
    net = network(name)
    small, plan, used = halved(net, monkeypatch)
    if name not in used:
        net = network(name, looks=True)
        small, plan, used = halved(net, monkeypatch)
        assert name in used
    assert (small.front.out_features, small.body.out_features) == (3, LEFT[name])
    assert_plan(net, small, plan)
    assert_zero_oracle(net, small, plan, EXAMPLE)


@pytest.mark.parametrize("name", some(SAMPLES, [*ONE_OF_EACH][::3]))
@torch.no_grad()
def test_permute__a_rule_keeps_what_is_computed_in_any_order(name):
    net, draw = network(name), torch.Generator().manual_seed(1)
    _, solution = trace_and_solve(net, EXAMPLE, None, "permute")
    free = {name: width.size for name, width in named_widths(solution).items() if not width.order}
    assert free
    orders = {name: torch.randperm(size, generator=draw) for name, size in free.items()}
    torch.testing.assert_close(surgery.symmetry.permute(net, orders, example=EXAMPLE)[0](EXAMPLE), net(EXAMPLE))


GROWING = [name for name in SAMPLES if "empty" not in name]  # whether what lies there is equal is left to chance


@pytest.mark.parametrize("name", some(GROWING, WIDENED.split()))
@torch.no_grad()
def test_widen__a_rule_keeps_what_is_computed_of_repeated_positions(name):
    net = network(name)
    if name in NOT_WIDENED.split():
        with refused("run"):
            surgery.widening.widen(net, rate=2, example=EXAMPLE)
        return
    wide, _ = surgery.widening.widen(net, rate=2, example=EXAMPLE)
    torch.testing.assert_close(wide(EXAMPLE), net(EXAMPLE))


def test_rule_samples__every_rule_has_samples():
    assert SAMPLES.keys() | KIN.keys() | APART == RULES.keys()
    assert all(RULES[name].function is RULES[other].function for name, other in KIN.items())


def test_narrow__the_axes_of_a_triangular_matrix_stay_whole():
    def forward(net, x):
        h = net.body(net.front(x))
        return net.head(torch.linalg.solve_triangular(9 + h.mT @ h, h.mT, upper=True).mT)

    net = randomized(Made(forward, front=nn.Linear(4, 6), body=nn.Linear(6, 8), head=nn.Linear(8, 3)).double()).eval()
    small, plan = surgery.narrow(net, 0.5, EXAMPLE)
    assert (small.front.out_features, small.body.out_features) == (3, 8)
    assert_zero_oracle(net, small, plan, EXAMPLE)
