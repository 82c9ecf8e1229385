"""Adapters of other ranks as states: names and tensors without a model.

The rank is the one axis that A [rank, in] and B [out, rank] share, and an adapter's sense is the product B A alone. Of
every function here it is known whether it keeps the products exactly, or how far off they are. The scale that
multiplies them is left as it is. Where a state holds it, as kohya's `alpha` for alpha / rank, alpha follows the rank.
What a configuration says (peft's lora_alpha / r) is not in a state: whoever writes one keeps the quotient.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from surgery.averaging import average
from surgery.errors import SurgeryError
from surgery.names import join
from surgery.states import State, as_state, check_same_shapes, compute_dtype
from surgery.transfer import upload

MAGNITUDE = "lora_magnitude_vector"
OURS = ("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")
SPELLINGS = (
    *OURS,  # peft's files, and diffusers' of today
    ("lora_A.*.weight", "lora_B.*.weight"),  # the state_dict of a PeftModel
    ("lora_embedding_A.*", "lora_embedding_B.*"),
    ("lora_down.weight", "lora_up.weight"),  # kohya's scripts, LyCORIS
    ("lora.down.weight", "lora.up.weight"),  # diffusers' UNets before peft
    ("lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),  # its text encoders
    ("down.weight", "up.weight"),  # its attention processors, `to_q_lora`
    ("lora_a.weight", "lora_b.weight"),  # torchtune
    ("lora_A", "lora_B"),  # loralib
)
"""How the names of A and B end after the name of the module; * is the name of the adapter."""
MAGNITUDES = MAGNITUDE, f"{MAGNITUDE}.weight", f"{MAGNITUDE}.*.weight", "dora_scale", "magnitude"
"""Ends of the names of DoRA's magnitudes."""


def _pattern(end: str) -> re.Pattern[str]:
    module = r".*_lora\d*" if end == "down.weight" else ".*"  # a word that any model may have, too
    return re.compile(rf"(?:({module})\.)" + "?" * (module == ".*") + re.escape(end).replace(r"\*", r"(.+)"))


_FIRST = [(_pattern(first), second) for first, second in SPELLINGS]
_PART = re.compile(
    r"(?:.*\.)?(?:lora_[ABEab]|lora_embedding_[AB]|lora_(?:down|up|mid)|lora_magnitude_vector|dora_scale|"
    r"(?:hada|lokr|oft|boft|vera)_\w+|(?:lora|lora_linear_layer|\w+_lora\d*)\.(?:down|up|alpha))(?:\..*)?"
)
"""The names of parts of adapters, of any kind and spelling."""


class Factors(NamedTuple):
    """An adapter: its tensors, with their names in a state.

    Attributes:
        names: of A and B.
        a, b: the factors.
        magnitude: None but for DoRA.
        alpha: one number, the rank times what the product is multiplied by; None where the state does not say it.
        others: the names that the magnitude and alpha have, or would have.
    """

    names: tuple[str, str]
    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None
    alpha: Tensor | None = None
    others: tuple[str, str] = (MAGNITUDE, "alpha")

    @property
    def state(self) -> State:
        """All by name."""
        every = zip((self.others[0], *self.names, self.others[1]), (self.magnitude, self.a, self.b, self.alpha))
        return {name: tensor for name, tensor in every if tensor is not None}

    @property
    def scale(self) -> float:
        """The factor of the product, alpha / rank; SurgeryError without alpha's value."""
        if self.alpha is None:
            return 1.0
        if self.alpha.is_meta or not math.isfinite(alpha := self.alpha.item()):
            raise SurgeryError(
                f"{self.others[1]!r} is not a finite number to scale the product by: set it", code="values"
            )
        return alpha / max(len(self.a), 1)

    def with_factors(self, a: Tensor, b: Tensor, scale: float) -> "Factors":
        """Replace A and B, whose product is to be multiplied by this scale."""
        if self.alpha is None:
            return self._replace(a=a, b=b)
        wanted = scale * len(a)
        for dtype in (self.alpha.dtype, torch.float32):
            alpha = torch.full_like(self.alpha, wanted, dtype=dtype)
            held = alpha.item()
            if held == wanted or (held and math.isfinite(held)):
                break
        return self._replace(a=a, b=b if held == wanted else wanted / held * b, alpha=alpha)  # B has what alpha cannot


def factors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Factors], State]:
    """Return a state's adapters by the names of their modules, and all other tensors.

    Raises SurgeryError for a factor without the other one, for two of unequal rank, for several adapters, and for parts
    of adapters that are no product B A.
    """
    pairs: dict[str, Factors] = {}
    rest = dict(as_state(tensors, "the adapters"))
    adapters: dict[str | None, str] = {}  # by an adapter's name a tensor of it
    for name in [name for name in rest if "lora" in name]:
        match, end = next(((m, end) for pattern, end in _FIRST if (m := pattern.fullmatch(name))), (None, ""))
        if match is None:
            continue
        module, *adapter = [group or "" for group in match.groups()]
        if "base_layer" in module.split("."):
            raise SurgeryError(
                f"{name!r} is of adapters around each other (peft's target_parameters): merge them into the base",
                code="unsupported",
            )
        second, *magnitudes = [join(module, e.replace("*", adapter[0] if adapter else "")) for e in (end, *MAGNITUDES)]
        if second not in rest:
            raise SurgeryError(f"{name!r} is there without {second!r}: an adapter has both", code="mismatch")
        adapters.setdefault(adapter[0] if adapter else None, name)
        if len(adapters) > 1 or module in pairs:
            other = pairs[module].names[0] if module in pairs else next(iter(adapters.values()))
            raise SurgeryError(f"{other!r} and {name!r} are of two adapters: give the tensors of one", code="mismatch")
        others = next((other for other in magnitudes if other in rest), magnitudes[0]), join(module, "alpha")
        alpha = rest.pop(others[1]) if others[1] in rest and rest[others[1]].numel() == 1 else None
        pair = Factors((name, second), rest.pop(name), rest.pop(second), rest.pop(others[0], None), alpha, others)
        a, b = pair.a, pair.b
        if min(a.ndim, b.ndim) < 2 or len(a) != b.shape[1] or b.shape[2:].numel() != 1:
            raise SurgeryError(
                f"{name!r} {list(a.shape)} and {second!r} {list(b.shape)} share no rank", code="mismatch"
            )
        pairs[module] = pair
    biases = {pair.names[1].removesuffix("weight") + "bias" for pair in pairs.values() if pair.alpha is None}
    scalars = {join(module, "scalar") for module in pairs}
    if odd := [name for name in rest if name in scalars or (_PART.fullmatch(name) and name not in biases)]:
        raise SurgeryError(
            f"{odd[0]!r} is no factor, or one without the other: give adapters of two factors, with both",
            code="mismatch",
        )
    return pairs, rest


def require_factors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Factors], State]:
    """`factors` of a state that has adapters. Raises SurgeryError for one without."""
    pairs, rest = factors(tensors)
    if not pairs:
        some = f", such as {next(iter(rest))!r}," if rest else ""
        raise SurgeryError(
            f"none of the {len(rest)} tensors{some} is an adapter's factor: names of factors end in "
            f"{', '.join(dict.fromkeys(first for first, _ in SPELLINGS))}",
            code="argument",
        )
    return pairs, rest


def check_unscaled(pairs: Mapping[str, Factors]) -> None:
    """Raise SurgeryError for an adapter with an alpha: another number scales it here."""
    if pair := next((pair for pair in pairs.values() if pair.alpha is not None), None):
        raise SurgeryError(
            f"{pair.others[1]!r} also scales the product: multiply {pair.names[1]!r} by alpha / rank, and drop alpha",
            code="argument",
        )


def name_factors(module: str, layer: nn.Module, a: Tensor, b: Tensor) -> Factors:
    """Return the factors beside a layer, under the names that peft gives them."""
    first, second = OURS[isinstance(layer, nn.Embedding)]
    others = join(module, MAGNITUDE), join(module, "alpha")
    return Factors((join(module, first), join(module, second)), a, b, others=others)


def rank_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the rank of each adapter by its module's name; SurgeryError without any.

    >>> rank_of({"fc.lora_A.weight": torch.zeros(3, 4), "fc.lora_B.weight": torch.zeros(2, 3)})
    {'fc': 3}
    """
    return {module: len(pair.a) for module, pair in require_factors(tensors)[0].items()}


def products(tensors: Mapping[str, Tensor]) -> State:
    """Return B A of each adapter, [out, in] or [out, in, *kernel], by module name.

    Where the state holds alpha, it is multiplied by alpha / rank.

    >>> products({"fc.lora_A.weight": torch.ones(1, 3), "fc.lora_B.weight": torch.full((2, 1), 2.0)})["fc"].tolist()
    [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    return {
        module: (pair.scale * pair.b.flatten(1) @ pair.a.flatten(1)).unflatten(1, pair.a.shape[1:])
        for module, pair in require_factors(tensors)[0].items()
    }


class ResizedAdapters(NamedTuple):
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
) -> ResizedAdapters:
    """Change the rank of adapters.

    A rank that grows is exact: B gets columns of zeros, and A rows that are initialised as in a new adapter. One that
    shrinks loses something, as little as possible with `svd`. DoRA's magnitudes stay as they are. So does the scale: an
    alpha in the state is multiplied as the rank is.

    Args:
        tensors: a state with adapters, as `surgery.adapters.state(model)` gives it, or under the names of a PeftModel's
            state_dict, of peft's files, kohya's scripts or diffusers. The result has the same names.
        rank: the new one, of all adapters or for each module.
        how: svd: the best product of that rank, or of the same (Eckart and Young), with its singular values in equal
            parts in A and B, the largest first; it takes the decomposition of a matrix of the old rank, never of the
            product. truncate: the first rows of A and columns of B, as HetLoRA takes them (Cho et al., EMNLP 2024).
        generator: initialises new rows; None: they are zero, so that both factors are (such rows learn nothing
            before one of them changes).

    >>> tensors = {"fc.lora_A.weight": torch.tensor([[1.0, 0.0], [1.0, 0.0]]), "fc.lora_B.weight": torch.eye(2)}
    >>> half, error = resize(tensors, 1)
    >>> half["fc.lora_A.weight"].shape, round(error["fc"], 6), resize(tensors, 1, how="truncate").error["fc"]
    (torch.Size([1, 2]), 0.0, 0.7071067690849304)
    """
    if how not in ("svd", "truncate"):
        raise SurgeryError(f"how={how!r}: give svd or truncate", code="argument")
    adapters, rest = require_factors(tensors)
    if isinstance(rank, Mapping) and adapters.keys() != rank.keys():
        raise SurgeryError(f"rank is given for {sorted(rank)}, the adapters are {sorted(adapters)}", code="name")
    result, error = dict(rest), dict.fromkeys(adapters, 0.0)
    lost: dict[str, Tensor] = {}
    for module, adapter in adapters.items():
        new = rank[module] if isinstance(rank, Mapping) else rank
        if isinstance(new, bool) or not isinstance(new, int) or new < 1:
            raise SurgeryError(f"rank={new!r}: give a whole number of at least 1", code="argument")
        if new > len(adapter.a) or (how == "truncate" and new == len(adapter.a)):
            a, b = _grow(adapter, new, generator)
        else:
            try:
                a, b, lost[module] = _shrunk(adapter, new, how)
            except torch.linalg.LinAlgError:
                raise SurgeryError(f"{module!r}'s adapter holds NaN or infinity: leave it out", code="values") from None
        result |= adapter.with_factors(a, b, adapter.scale).state
    if lost:  # one wait for the device, not one for each module
        error |= zip(lost, torch.stack([*lost.values()]).tolist())
    return ResizedAdapters({name: result[name] for name in tensors}, error)


def _grow(pair: Factors, rank: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    more = pair.a.new_zeros(rank - len(pair.a), *pair.a.shape[1:])
    if generator is not None and len(more):
        bound = pair.a.shape[1:].numel() ** -0.5  # as in nn.init.kaiming_uniform_(a=sqrt(5))
        drawn = torch.empty(more.shape, device=generator.device).uniform_(-bound, bound, generator=generator)
        more = upload(drawn.to(more.dtype), more.device)
    none = pair.b.new_zeros(len(pair.b), len(more), *pair.b.shape[2:])
    return torch.cat([pair.a, more]), torch.cat([pair.b, none], 1)


def _shrunk(pair: Factors, rank: int, how: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(pair.a.dtype)
    a, b = pair.a.flatten(1).to(dtype), pair.b.flatten(1).to(dtype)
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
        a.to(pair.a.dtype).unflatten(1, pair.a.shape[1:]),
        b.to(pair.b.dtype).view(len(b), rank, *pair.b.shape[2:]),
        error,
    )


def stack(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None = None) -> State:
    """Join adapters along the rank; the product is exactly the weighted mean product.

    FLoRA's aggregation (Wang et al., NeurIPS 2024, eq. 6), and with `resize` after it FlexLoRA's. The mean of factors,
    in contrast, has a product that is no mean of products.

    Args:
        states: adapters of the same modules under the same names, as for `resize`, of any ranks, whose products are
            multiplied by the same scales, or by those that the states hold (alpha / rank). All other tensors are
            averaged.
        weights: of each; they are divided by their sum. None: equal ones.

    Returns:
        Adapters whose ranks are the sums of the given ones. The weights are in B. With alpha the scale is the
        first state's.

    Raises:
        SurgeryError: for a state without adapters, for other names or shapes, and for DoRA.

    >>> one = {"fc.lora_A.weight": torch.ones(1, 2), "fc.lora_B.weight": torch.ones(2, 1)}
    >>> two = {"fc.lora_A.weight": torch.eye(2), "fc.lora_B.weight": torch.eye(2)}
    >>> both = stack([one, two])
    >>> rank_of(both), products(both)["fc"].tolist()
    ({'fc': 3}, [[1.0, 0.5], [0.5, 1.0]])
    """
    if not states:
        raise SurgeryError("there are no adapters to stack: give at least one state", code="argument")
    split = [require_factors(tensors) for tensors in states]
    if dora := [name for pairs, _ in split for name, pair in pairs.items() if pair.magnitude is not None]:
        raise SurgeryError(f"the adapter of {dora[0]!r} is DoRA's: merge and average instead", code="unsupported")
    shares = [1.0] * len(states) if weights is None else [float(weight) for weight in weights]
    if min(shares, default=0) < 0:
        raise SurgeryError(
            f"weights {shares} are negative: subtract by peft's add_weighted_adapter, or merging.task_arithmetic",
            code="argument",
        )
    if len(shares) != len(states) or not 0 < sum(shares) < math.inf:
        raise SurgeryError(f"weights {shares} for {len(states)} states: give each one, one above 0", code="argument")
    shares = [share / sum(shares) for share in shares]
    for k, (pairs, _) in enumerate(split[1:], 1):
        check_same_shapes(_rankless(split[0][0]), _rankless(pairs), "state 0", f"state {k}")
    result: State = average([rest for _, rest in split], weights=shares) if split[0][1] else {}
    for module, pair in split[0][0].items():
        every = [pairs[module] for pairs, _ in split]
        a = torch.cat([other.a for other in every])
        scale = pair.scale or 1.0
        b = torch.cat([share * (other.scale / scale) * other.b for share, other in zip(shares, every)], 1)
        result |= pair.with_factors(a, b, scale).state
    return {name: result[name] for name in states[0]}


def _rankless(pairs: Mapping[str, Factors]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all factors without the axis of the rank, and of alpha."""
    shapes = {}
    for pair in pairs.values():
        shapes[pair.names[0]] = tuple(pair.a.shape[1:])
        shapes[pair.names[1]] = (len(pair.b), *pair.b.shape[2:])
        if pair.alpha is not None:
            shapes[pair.others[1]] = ()
    return shapes
