"""Adapters of other ranks, as states: names and tensors, with no model around them.

The rank is the one axis that A [rank, in] and B [out, rank] share, and an adapter's sense is the product B A alone. Of
every function here it is known whether it keeps the products exactly, or how far off they are. The scale that
multiplies them is left as it is.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from surgery.averaging import average
from surgery.errors import SurgeryError
from surgery.names import joined
from surgery.states import State, as_state, check_same_shapes, compute_dtype
from surgery.transfer import upload

MAGNITUDE = "lora_magnitude_vector"
SUFFIXES = ("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")


class Factors(NamedTuple):
    """An adapter: the names of A and B in a state, and the tensors; of DoRA with the magnitude."""

    names: tuple[str, str]
    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None

    @property
    def state(self) -> State:
        """All by name."""
        own = {} if self.magnitude is None else {self.names[0].rpartition("lora_")[0] + MAGNITUDE: self.magnitude}
        return own | {self.names[0]: self.a, self.names[1]: self.b}


def factors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Factors], State]:
    """The adapters of a state by the names of their modules, and all other tensors.

    Raises SurgeryError for a factor without the other one, and for two of unequal rank.
    """
    found: dict[str, Factors] = {}
    rest = dict(as_state(tensors, "the adapters"))
    for name in list(rest):
        for ends in SUFFIXES:
            module, _, last = name.rpartition(ends[0])
            if last or (module and module[-1] != ".") or not name.endswith(ends[0]):
                continue
            names = name, module + ends[1]
            if names[1] not in rest:
                raise SurgeryError(f"{names[0]!r} is there without {names[1]!r}: an adapter has both")
            one = Factors(names, rest.pop(names[0]), rest.pop(names[1]), rest.pop(module + MAGNITUDE, None))
            if one.b.ndim < 2 or len(one.a) != one.b.shape[1]:
                raise SurgeryError(
                    f"{names[0]!r} {tuple(one.a.shape)} and {names[1]!r} {tuple(one.b.shape)} are of unequal rank"
                )
            found[module.removesuffix(".")] = one
    if odd := [name for name in rest if name.endswith((MAGNITUDE, *(end for ends in SUFFIXES for end in ends)))]:
        raise SurgeryError(f"{odd[0]!r} is there without its other factor: an adapter has both")
    return found, rest


def named(module: str, layer: nn.Module, a: Tensor, b: Tensor) -> Factors:
    """The factors beside a layer, under the names that peft gives them."""
    first, second = SUFFIXES[isinstance(layer, nn.Embedding)]
    return Factors((joined(module, first), joined(module, second)), a, b)


def rank_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The rank of each adapter, by the name of its module.

    >>> rank_of({"fc.lora_A.weight": torch.zeros(3, 4), "fc.lora_B.weight": torch.zeros(2, 3)})
    {'fc': 3}
    """
    return {module: len(one.a) for module, one in factors(tensors)[0].items()}


def products(tensors: Mapping[str, Tensor]) -> State:
    """B A of each adapter, [out, in] or for convolutions [out, in, *kernel], by the name of its module.

    >>> products({"fc.lora_A.weight": torch.ones(1, 3), "fc.lora_B.weight": torch.full((2, 1), 2.0)})["fc"].tolist()
    [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    return {
        module: (one.b.flatten(1) @ one.a.flatten(1)).unflatten(1, one.a.shape[1:])
        for module, one in factors(tensors)[0].items()
    }


class Resized(NamedTuple):
    """Adapters of another rank.

    Attributes:
        state: the tensors; what is no adapter is as it was.
        error: for each module ||B A - B' A'|| / ||B A||, which is 0 where the rank grew.
    """

    state: State
    error: dict[str, float]


def resize(
    tensors: Mapping[str, Tensor],
    rank: int | Mapping[str, int],
    *,
    how: Literal["svd", "truncate"] = "svd",
    generator: torch.Generator | None = None,
) -> Resized:
    """Change the rank of adapters.

    A rank that grows is exact: B gets columns of zeros, and A rows that are drawn as those of a new adapter. One that
    shrinks loses something, as little as possible with `svd`. DoRA's magnitudes stay as they are.

    Args:
        tensors: a state with adapters, as `surgery.adapters.state(model)` gives it.
        rank: the new one, of all adapters or for each module.
        how: svd: the best product of that rank, or of the same (Eckart and Young), with its singular values in equal
            parts in A and B, the largest first; it takes the decomposition of a matrix of the old rank, never of the
            product. truncate: the first rows of A and columns of B, as HetLoRA takes them (Cho et al., EMNLP 2024).
        generator: what new rows are drawn with; None: they are zero, so that both factors are (such rows learn nothing
            before one of them changes).

    >>> tensors = {"fc.lora_A.weight": torch.tensor([[1.0, 0.0], [1.0, 0.0]]), "fc.lora_B.weight": torch.eye(2)}
    >>> half, error = resize(tensors, 1)
    >>> half["fc.lora_A.weight"].shape, round(error["fc"], 6), resize(tensors, 1, how="truncate").error["fc"]
    (torch.Size([1, 2]), 0.0, 0.7071067690849304)
    """
    if how not in ("svd", "truncate"):
        raise SurgeryError(f"how={how!r}: give svd or truncate")
    found, rest = factors(tensors)
    if isinstance(rank, Mapping) and (odd := [*(found.keys() ^ rank.keys())]):
        raise SurgeryError(
            f"rank is given for {sorted(rank)}, and the adapters are {sorted(found)}: {odd[0]!r} differs"
        )
    result, error = dict(rest), dict.fromkeys(found, 0.0)
    lost: dict[str, Tensor] = {}
    for module, one in found.items():
        new = rank[module] if isinstance(rank, Mapping) else rank
        if isinstance(new, bool) or not isinstance(new, int) or new < 1:
            raise SurgeryError(f"rank={new!r}: give a whole number of at least 1")
        if new > len(one.a) or (how == "truncate" and new == len(one.a)):
            a, b = _grown(one, new, generator)
        else:
            try:
                a, b, lost[module] = _shrunk(one, new, how)
            except torch.linalg.LinAlgError:
                raise SurgeryError(f"the adapter of {module!r} holds NaN or infinity: leave it out") from None
        result |= one._replace(a=a, b=b).state
    if lost:  # one wait for the device, not one for each module
        error |= zip(lost, torch.stack([*lost.values()]).tolist())
    return Resized({name: result[name] for name in tensors}, error)


def _grown(one: Factors, rank: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    more = one.a.new_zeros(rank - len(one.a), *one.a.shape[1:])
    if generator is not None and len(more):
        bound = one.a.shape[1:].numel() ** -0.5  # that of nn.init.kaiming_uniform_(a=sqrt(5))
        drawn = torch.empty(more.shape, device=generator.device).uniform_(-bound, bound, generator=generator)
        more = upload(drawn.to(more.dtype), more.device)
    none = one.b.new_zeros(len(one.b), len(more), *one.b.shape[2:])
    return torch.cat([one.a, more]), torch.cat([one.b, none], 1)


def _shrunk(one: Factors, rank: int, how: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(one.a.dtype)
    a, b = one.a.flatten(1).to(dtype), one.b.flatten(1).to(dtype)
    # B A = Q_b (R_b R_a^T) Q_a^T, whose core has the old rank on both sides at most.
    q_a, r_a = torch.linalg.qr(a.T)
    q_b, r_b = torch.linalg.qr(b)
    u, s, v = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    if how == "truncate":
        a, b, lost = a[:rank], b[:, :rank], torch.linalg.norm(r_b[:, rank:] @ r_a[:, rank:].T)
    else:
        root = s[:rank].sqrt()
        a, b, lost = (q_a @ (v[:rank].T * root)).T, q_b @ (u[:, :rank] * root), torch.linalg.norm(s[rank:])
        if missing := rank - len(root):  # a layer may have fewer inputs or outputs than the rank
            a, b = (torch.cat([t, t.new_zeros(shape)], d) for t, shape, d in (
                (a, (missing, a.shape[1]), 0), (b, (len(b), missing), 1)
            ))  # fmt: skip
    whole = torch.linalg.norm(s)
    error = torch.where(whole > 0, lost / whole, 0)
    return (
        a.to(one.a.dtype).unflatten(1, one.a.shape[1:]),
        b.to(one.b.dtype).view(len(b), rank, *one.b.shape[2:]),
        error,
    )


def stack(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None = None) -> State:
    """Join adapters along the rank, so that their product is the weighted mean of the products, exactly.

    FLoRA's aggregation (Wang et al., NeurIPS 2024, eq. 6), and with `resize` after it FlexLoRA's. The mean of factors,
    in contrast, has a product that is no mean of products.

    Args:
        states: adapters of the same modules, of any ranks, whose products are multiplied by the same scales. All other
            tensors are averaged.
        weights: of each; they are divided by their sum. None: equal ones.

    Returns:
        Adapters whose ranks are the sums of the given ones. The weights are in B.

    >>> one = {"fc.lora_A.weight": torch.ones(1, 2), "fc.lora_B.weight": torch.ones(2, 1)}
    >>> two = {"fc.lora_A.weight": torch.eye(2), "fc.lora_B.weight": torch.eye(2)}
    >>> both = stack([one, two])
    >>> rank_of(both), products(both)["fc"].tolist()
    ({'fc': 3}, [[1.0, 0.5], [0.5, 1.0]])
    """
    if not states:
        raise SurgeryError("there are no adapters to stack: give at least one state")
    split = [factors(tensors) for tensors in states]
    if dora := [name for found, _ in split for name, one in found.items() if one.magnitude is not None]:
        raise SurgeryError(f"the adapter of {dora[0]!r} is DoRA's, whose magnitudes have no stack: merge and average")
    shares = [1.0] * len(states) if weights is None else [float(weight) for weight in weights]
    if len(shares) != len(states) or not 0 < sum(shares) < math.inf or min(shares) < 0:
        raise SurgeryError(f"weights {shares} for {len(states)} states: give each one, none below 0 and one above 0")
    shares = [share / sum(shares) for share in shares]
    for k, (found, _) in enumerate(split[1:], 1):
        check_same_shapes(_rankless(split[0][0]), _rankless(found), "state 0", f"state {k}")
    result: State = average([rest for _, rest in split], weights=shares) if split[0][1] else {}
    for module, one in split[0][0].items():
        every = [found[module] for found, _ in split]
        a = torch.cat([each.a for each in every])
        b = torch.cat([share * each.b for share, each in zip(shares, every)], 1)
        result |= one._replace(a=a, b=b).state
    return {name: result[name] for name in states[0]}


def _rankless(found: Mapping[str, Factors]) -> dict[str, tuple[int, ...]]:
    """The shapes of all factors without the axis of the rank."""
    shapes = {}
    for one in found.values():
        shapes[one.names[0]] = tuple(one.a.shape[1:])
        shapes[one.names[1]] = (len(one.b), *one.b.shape[2:])
    return shapes
