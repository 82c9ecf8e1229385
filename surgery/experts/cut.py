"""Keep some experts of a mixture, or merge groups of experts; both return a plan."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.experts.mixtures import Mixture, mixtures
from surgery.forward import named_tensors
from surgery.names import is_inside, join, matches, outwards
from surgery.plan import Edit, Plan, Source
from surgery.rows import count_edits, keep_rows, plan_of_rows, tensors_along
from surgery.states import names_by_id, state

Keep: TypeAlias = int | Sequence[int]
Groups: TypeAlias = int | Sequence[Sequence[int]]
_COUNTS = re.compile(r"^(n|num|e|out_features)$|^(?!.*(shared|top|active|activated|per_)).*experts?(_num|_count)?$")


def keep(
    model: nn.Module,
    keep: Keep | Mapping[str, Keep],
    *,
    scores: Mapping[str, Tensor] | None = None,
    experts: str | None = None,
) -> tuple[nn.Module, Plan]:
    """Keep some of the experts of each mixture, and the router's rows for them.

    The experts keep their order, and the router sends each token to the best experts that are left. If all experts of a
    token are kept, its output does not change, provided that the router normalises over the experts that it chooses.
    The model's configuration, if it has one (transformers: Mixtral, Qwen3-MoE, gpt-oss, DeepSeek), gets the new number,
    so that `from_pretrained` reads what `save_pretrained` writes. Shared experts stay.

    Args:
        model: the model, which stays as it is.
        keep: the number of experts that stay in each mixture, those with the highest scores; or the experts' indices.
            A mapping gives either by name or pattern of a mixture (`surgery.experts.mixtures`). A mixture that no
            pattern matches keeps all experts. A configuration with one number for all mixtures cannot express this.
        scores: by mixture, one number for each expert, as `surgery.experts.frequency` and `surgery.experts.norm` return
            them. Of experts with equal scores the first stays.
        experts: as for `surgery.experts.mixtures`.

    Returns:
        The model with fewer experts, and the plan: where its tensors lie in the full model.

    Raises:
        SurgeryError: if fewer experts would be left than the router chooses for a token; if groups of experts
            (DeepSeek's `n_group`) would become unequal; if an index is wrong; if `keep` is a number and there are no
            scores.

    >>> class Layer(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gate, self.k = nn.Linear(4, 3), 2
    ...         self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    >>> layer = Layer()
    >>> small, plan = keep(layer, [0, 2])
    >>> small.gate, len(small.experts), torch.equal(small.experts[1].weight, layer.experts[2].weight)
    (Linear(in_features=4, out_features=2, bias=True), 2, True)
    """
    all_mixtures = mixtures(model, experts=experts)
    choices = [
        (mixture, _choose_kept(mixture, request, scores)) for mixture, request in _resolve(all_mixtures, keep, "keep")
    ]
    plan = _plan(model, choices)
    return plan.build_unchecked(model), plan


def merge(
    model: nn.Module,
    groups: Groups | Mapping[str, Groups],
    *,
    scores: Mapping[str, Tensor] | None = None,
    experts: str | None = None,
) -> tuple[nn.Module, Plan]:
    """Merge groups of experts: each group becomes one, the mean of its weights.

    The router's row and bias of a merged expert are the means of its members', with the same weights. So its logit is
    the mean of their logits, and the router chooses it for other tokens than its members: fine-tune the model, or check
    its loss. (Li et al., "Merge, Then Compress", ICLR 2024, also merges by frequency.)

    Args:
        model: the model, which stays as it is.
        groups: lists of experts, or the number of groups; for all mixtures, or by name or pattern of a mixture. An
            expert in no list is dropped. With a number, each of the experts with the highest scores begins a group, and
            every other expert joins the one with the most similar row of the router (cosine).
        scores: by mixture, the weights of the mean, as `surgery.experts.frequency` returns them. None: equal weights.
        experts: as for `surgery.experts.mixtures`.

    Returns:
        The model with merged experts, and the plan. The full model does not contain the means, so the plan names the
        member with the highest score of each group: `plan.extract(model)` returns these members, not merged.

    Raises:
        SurgeryError: as `surgery.experts.keep` does; also if a group is empty, a score is below 0, or an expert is in
            two groups.

    >>> layer = nn.ModuleDict({"gate": nn.Linear(4, 3), "experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
    >>> small, _ = merge(layer, [[0, 2], [1]], scores={"": torch.tensor([3.0, 1.0, 1.0])})
    >>> mean = 0.75 * layer.experts[0].weight + 0.25 * layer.experts[2].weight
    >>> torch.allclose(small["experts"][0].weight, mean)
    True
    """
    all_mixtures = mixtures(model, experts=experts)
    grouped = [
        (mixture, _group(model, mixture, request, scores))
        for mixture, request in _resolve(all_mixtures, groups, "groups")
    ]
    plan = _plan(model, [(mixture, [first for first, *_ in mixture_groups]) for mixture, mixture_groups in grouped])
    full = state(model)
    small = plan.build_unchecked(model)
    means = state(small)  # in the small model's own tensors
    for mixture, mixture_groups in grouped:
        axes = {name: axis for name, (_, axis) in tensors_along(model, mixture.axes).items()}
        for position, members in enumerate(mixture_groups):
            weights = _weights(mixture, members, scores)
            for name, parts in _of_experts(model, mixture, position, members).items():
                means[name].copy_(sum(w * full[part].detach().double() for w, part in zip(weights.tolist(), parts)))
            for name, axis in axes.items():
                rows = full[name].detach().double().index_select(axis, torch.tensor(members, device=full[name].device))
                shape = [-1 if i == axis else 1 for i in range(rows.ndim)]
                mean = (rows * weights.view(shape).to(rows.device)).sum(axis)
                means[name].select(axis, position).copy_(mean)
    return small, plan


def _resolve(all_mixtures: Sequence[Mixture], request: Any, argument: str) -> list[tuple[Mixture, Any]]:
    """Return the mixtures to cut, and requests; SurgeryError for unmatched patterns."""
    by_name = request if isinstance(request, Mapping) else {"*": request}
    names = [mixture.name for mixture in all_mixtures]
    for pattern in by_name if isinstance(request, Mapping) else ():
        if not any(name == pattern or matches(name, pattern) for name in names):
            raise SurgeryError(f"{argument}[{pattern!r}] matches none of the mixtures {names}", code="name")
    result = []
    for mixture in all_mixtures:
        values = [
            value
            for pattern, value in by_name.items()
            if pattern in ("*", mixture.name) or matches(mixture.name, pattern)
        ]
        result += [(mixture, value) for value in values[:1]]
    return result


def _score(mixture: Mixture, scores: Mapping[str, Tensor] | None) -> Tensor:
    if not isinstance(scores, Mapping) or mixture.name not in scores:
        raise SurgeryError(
            f"a number of experts needs scores of {mixture.name!r}: surgery.experts.frequency or norm gives them",
            code="argument",
        )
    score = torch.as_tensor(scores[mixture.name]).detach()
    if score.is_meta or score.shape != (mixture.size,) or not score.isfinite().all():
        raise SurgeryError(
            f"scores of {mixture.name!r} are {mixture.size} numbers, got {tuple(score.shape)}", code="argument"
        )
    return score.double().cpu()


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _choose_kept(mixture: Mixture, request: Any, scores: Mapping[str, Tensor] | None) -> list[int]:
    """Return the experts that stay, in ascending order."""
    if _is_count(request):
        if not 1 <= request <= mixture.size or request % mixture.groups:
            parts = f" that its {mixture.groups} groups can share" if mixture.groups > 1 else ""
            raise SurgeryError(
                f"{mixture.name!r} has {mixture.size} experts: keep 1 to {mixture.size}{parts}", code="argument"
            )
        best = _score(mixture, scores).view(mixture.groups, -1).argsort(dim=1, descending=True, stable=True)
        first = torch.arange(mixture.groups)[:, None] * (mixture.size // mixture.groups)
        request = (best[:, : request // mixture.groups] + first).flatten().tolist()
    numbers = _numbers(mixture, request)
    _check_router(mixture, numbers)
    return numbers


def _numbers(mixture: Mixture, request: Any) -> list[int]:
    """Return experts' indices in ascending order; SurgeryError if they are wrong."""
    request = request.tolist() if isinstance(request, Tensor) else request
    numbers = sorted(request) if isinstance(request, Sequence | set | range) and all(map(_is_count, request)) else []
    if not numbers or len(set(numbers)) < len(numbers) or not 0 <= numbers[0] <= numbers[-1] < mixture.size:
        raise SurgeryError(
            f"{request!r}: give some of {mixture.size} experts of {mixture.name!r}, from 0 on", code="argument"
        )
    return numbers


def _check_router(mixture: Mixture, numbers: Sequence[int]) -> None:
    """Raise SurgeryError if the router cannot choose among the experts that are left."""
    if len(numbers) < mixture.chosen:
        raise SurgeryError(
            f"the router of {mixture.name!r} chooses {mixture.chosen} experts a token: keep {mixture.chosen} or more",
            code="argument",
        )
    counts = [
        sum(number * mixture.groups // mixture.size == group for number in numbers) for group in range(mixture.groups)
    ]
    least = 2 if any("correction" in key for _, key, _ in mixture.router) and mixture.groups > 1 else 1
    if len(set(counts)) > 1 or min(counts) < least:
        raise SurgeryError(
            f"the router of {mixture.name!r} needs as many experts in all groups, {least} or more, got {counts}",
            code="argument",
        )


def _group(model: nn.Module, mixture: Mixture, request: Any, scores: Mapping[str, Tensor] | None) -> list[list[int]]:
    """Return the groups' members, best score first; groups are sorted by their first."""
    score = torch.ones(mixture.size, dtype=torch.float64) if scores is None else _score(mixture, scores)
    if _is_count(request):
        best = _choose_kept(mixture, request, scores)
        router = [(getattr(model.get_submodule(module), key).detach(), axis) for module, key, axis in mixture.router]
        rows = torch.cat([t.double().movedim(axis, 0).flatten(1).cpu() for t, axis in router if t.ndim == 2], 1)
        like = nn.functional.cosine_similarity(rows[:, None], rows[best], dim=2)
        same = torch.tensor([[i * mixture.groups // mixture.size == b * mixture.groups // mixture.size for b in best]
                             for i in range(mixture.size)])  # fmt: skip
        nearest = like.masked_fill(~same, -2).argmax(1).tolist()
        request = [[b, *(i for i in range(mixture.size) if i not in best and best[nearest[i]] == b)] for b in best]
    if not isinstance(request, Sequence) or not request:
        raise SurgeryError(f"groups are lists of experts, or how many, got {request!r}", code="argument")
    groups = [_numbers(mixture, group) for group in request]
    _numbers(mixture, [number for group in groups for number in group])
    if any(len({number * mixture.groups // mixture.size for number in group}) > 1 for group in groups):
        raise SurgeryError(
            f"the router of {mixture.name!r} has {mixture.groups} groups: merge within them", code="argument"
        )
    groups = sorted(sorted(group, key=lambda number: (-float(score[number]), number)) for group in groups)
    _check_router(mixture, [first for first, *_ in groups])
    return groups


def _weights(mixture: Mixture, members: Sequence[int], scores: Mapping[str, Tensor] | None) -> Tensor:
    if scores is None:
        return torch.full((len(members),), 1 / len(members), dtype=torch.float64)
    weights = _score(mixture, scores)[list(members)]
    if weights.min() < 0:
        raise SurgeryError(f"the scores of {mixture.name!r} weigh a mean: none may be below 0", code="argument")
    return weights / weights.sum() if weights.sum() else torch.full_like(weights, 1 / len(members))


def _of_experts(model: nn.Module, mixture: Mixture, position: int, members: Sequence[int]) -> dict[str, list[str]]:
    """Return names of members' tensors for each tensor of the expert at a position."""
    held = names_by_id(model)
    result = {}
    for holder in mixture.lists:
        named = [dict(named_tensors(child)) for child in model.get_submodule(holder).children()]
        result |= {held[id(t)]: [held[id(named[m][key])] for m in members]
                   for key, t in named[position].items() if id(t) in held}  # fmt: skip
    return result


def _plan(model: nn.Module, choices: Sequence[tuple[Mixture, Sequence[int]]]) -> Plan:
    """Return the plan of a model with fewer experts."""
    entries = {name: Source(name, (None,) * tensor.ndim) for name, tensor in state(model).items()}
    edits: list[Edit] = []
    modules = dict(model.named_modules())
    for mixture, numbers in choices:
        if len(numbers) == mixture.size:
            continue
        rows, slices = keep_rows(model, mixture.axes, numbers)
        entries |= rows
        edits += slices
        for holder in mixture.lists:
            gone = [join(holder, key) for key in [*modules[holder]._modules][len(numbers) :]]
            for name in [name for name in entries if any(is_inside(name, expert) for expert in gone)]:
                del entries[name]
            for place, number in enumerate(numbers):
                for name, (source,) in _of_experts(model, mixture, place, [number]).items():
                    entries[name] = entries[name]._replace(name=source)
            edits.append(
                {"do": "remove", "module": holder, "first": len(numbers), "count": mixture.size - len(numbers)}
            )
        places = (*mixture.lists, *(str(module) for module, *_ in (*mixture.fused, *mixture.router)))
        near = {name: modules[name] for place in (mixture.name, *places) for name in outwards(place)}
        edits += count_edits(near, _COUNTS, mixture.size, len(numbers))
    return plan_of_rows(model, entries, edits)
