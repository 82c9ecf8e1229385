"""Whether an operation of `surgery` handles a model: each judge raises `Miss`, or the operation's own error."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import surgery
from benchmarks import zeros
from benchmarks.calls import call, outputs, tensors
from benchmarks.models.case import Case
from surgery.depth.sections import repeatable

# Why a whole axis is no miss: it belongs to the data, to a window or table, or tells heads and groups apart.
RIGHTLY_WHOLE = (
    "input",
    "output",
    "window",
    "looked up",
    "is picked",
    "picked by an index",
    "order of its positions",
    "divided inside",
    "no layer makes it",
    "pixels",
    "sampled",
    "transform",
    "stacked",
    "heads or groups",
    "separates heads",
    "told apart",
)
HEADS = ("num_heads", "num_attention_heads", "n_heads", "heads", "nhead")
PROJECTIONS = (("qkv",), ("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"))


class Miss(Exception):
    """The model does not count as handled; the message says why."""


class NothingToDo(Exception):
    """The operation has nothing to do for this model, which is counted neither as handled nor as a miss."""


def decompose(case: Case, model: nn.Module, example: Any) -> None:
    """Every tensor is in exactly one layer, in registration and in execution order."""
    names = sorted(surgery.state(model))
    check(sorted(model.state_dict()) == names or len(names) < len(model.state_dict()), "state and state_dict differ")
    for layers in (surgery.layers(model), *([] if example is None else [surgery.layers(model, example=example)])):
        check(sorted(t for layer in layers for t in layer.tensors) == names, "tensors are missing or held twice")


def shuffle(case: Case, model: nn.Module, example: Any) -> None:
    """Three random instances, recombined layer by layer, run."""
    model.eval()
    shapes = case.shapes(outputs(model, example))
    models = surgery.stack([surgery.state(net) for net in (model, case.build(), case.build())])
    parts = surgery.segments(surgery.layers(model))
    swaps = surgery.permutations(len(parts), 3, generator=torch.Generator().manual_seed(0))
    for mixed in surgery.unstack(surgery.shuffle(models, segments=parts, permutations=swaps, inplace=True)):
        found = outputs(surgery.load(model, mixed), example)
        check(case.shapes(found) == shapes, "another shape of the output")
        check(all(finite(t) for t in found), "the output is not finite")


def graft(case: Case, model: nn.Module, example: Any) -> None:
    """One more block in every section, called as often as the one that it repeats, and undone bit for bit.

    A section whose last block the model does not run on the example (an encoder of sounds, say, without any) is left
    as it is.
    """
    if not case.blocks:
        raise NothingToDo
    found = surgery.sections(model)
    depths = {s.name: len(s.blocks) + 1 for s in found if repeatable(model, s)}
    check(bool(depths), f"no section with a block that may be repeated, of {len(found)} sections")
    if example is not None:
        model.eval()
        ran = calls_of(model, [s.blocks[-1] for s in found if s.name in depths], example)
        depths = {s.name: depths[s.name] for s in found if s.name in depths and ran[s.blocks[-1]]}
        check(bool(depths), "no section with a block that may be repeated runs on the example")
    deeper, plan = surgery.graft(model, depths=depths, example=example)
    again = {s.name: s for s in surgery.sections(deeper)}
    check(all(len(again[n].blocks) == depth for n, depth in depths.items()), "the depth is not what was asked for")
    if example is not None:
        blocks = [block for section, depth in depths.items() for block in again[section].blocks[depth - 2 :]]
        calls = calls_of(deeper.eval(), blocks, example)
        for section, depth in depths.items():
            last, new = again[section].blocks[depth - 2 :]
            check(calls[new] == calls[last] >= 1, f"the new block {new} ran {calls[new]} times, {last} {calls[last]}")
    depths = {s.name: len(s.blocks) for s in found}
    before = surgery.state(model)
    for back in (plan.build(deeper), surgery.ungraft(deeper, keep=depths, example=example)[0]):
        after = surgery.state(back)
        check(list(before) == list(after), "undone, the tensors have other names")
        equal = (
            a.shape == b.shape and (a.is_meta or torch.equal(a, b)) for a, b in zip(before.values(), after.values())
        )
        check(all(equal), "undone, the tensors differ")


def calls_of(model: nn.Module, blocks: Sequence[str], example: Any) -> Counter[str]:
    """Return how often each block runs; a Miss if the output is not finite."""
    modules, calls, hooks = dict(model.named_modules()), Counter[str](), []
    for block in blocks:
        watched = modules[block]
        while isinstance(watched, nn.ModuleList):  # of a pair in a list nothing but its parts are called
            watched = watched[0]
        hooks.append(watched.register_forward_hook(lambda *_, block=block: calls.update([block])))
    check(all(finite(t) for t in outputs(model, example)), "the output is not finite")
    for hook in hooks:
        hook.remove()
    return calls


def narrow(case: Case, model: nn.Module, example: Any) -> list[str]:
    """Every hidden width is halved, the narrow model computes the right thing and trains, and the plan is exact.

    Returns:
        What its numbers were compared with: "half", the model that its constructor makes half as wide; "zeros", the
        full model with zeros.
    """
    randomize(model)
    small, plan = surgery.narrow(model, 0.5, example)
    check_small(case, model, small, example)
    same, operation = zeros.agrees(model, small, plan, example)
    # Where the constructor's half-wide model computes the same, a scale may follow a width (a rank, say).
    check(same or bool(operation) or bool(case.half), "other numbers than the full model with zeros")
    values = surgery.state(small)
    full, _ = plan.embed(values)
    back = plan.extract(full)
    check(all(same_bits(back[n], values[n]) for n in values), "extract(embed(x)) is not x")
    return ["half"] * bool(case.half) + ["zeros"] * same


def randomize(model: nn.Module) -> None:
    """Add noise to all weights, so that none is a row of ones or zeros, which any other would match."""
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn_like(tensor))
        for name, tensor in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                tensor.copy_(0.3 + torch.rand_like(tensor))


def torch_pruning(case: Case, model: nn.Module, example: Any) -> None:
    """torch-pruning's pruner keeps the first channels, told of heads; repaired as its examples do."""
    import torch_pruning as tp

    full = case.build()
    full.load_state_dict(model.state_dict())
    heads = {
        getattr(m, part): getattr(m, name)
        for m in model.modules()
        for name in HEADS[:3] if isinstance(getattr(m, name, None), int)
        for parts in PROJECTIONS if all(isinstance(getattr(m, part, None), nn.Linear) for part in parts)
        for part in parts
    }  # fmt: skip
    last = model.get_classifier() if hasattr(model, "get_classifier") else None
    ignored = [m for m in (last if isinstance(last, list | tuple) else [last]) if isinstance(m, nn.Module)]
    if not ignored:
        ignored = [[m for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)][-1]]
    pruner = tp.pruner.BasePruner(
        model.eval(), example, importance=KeepFirst(), pruning_ratio=0.5, ignored_layers=ignored, num_heads=heads,
        prune_num_heads=False, prune_head_dims=True,
    )  # fmt: skip
    pruner.step()
    for module in model.modules():
        for parts in PROJECTIONS:
            first = getattr(module, parts[0], None)
            if isinstance(first, nn.Linear) and first in heads:
                _repair(module, first.out_features // (3 if len(parts) == 1 else 1), pruner.num_heads[first])
    check_small(case, full, model, example)


def _repair(module: nn.Module, width: int, heads: int) -> None:
    """Tell an attention its new sizes, under the names that timm and transformers have for them."""
    sizes = {
        **dict.fromkeys(HEADS, heads), **dict.fromkeys(("head_dim", "attention_head_size"), width // heads),
        **dict.fromkeys(("attn_dim", "all_head_size", "embed_dim", "dim"), width),
    }  # fmt: skip
    for name, value in sizes.items():
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, value)


class KeepFirst:
    """An importance for torch-pruning that falls with the channel's number."""

    def __call__(self, group, **_):
        return torch.arange(len(group[0].idxs), 0, -1).float()


def check_small(case: Case, full: nn.Module, small: nn.Module, example: Any) -> None:
    """Check that the widths are halved, and that the small model runs and trains."""
    if case.half:
        check_like_half(case.half(), small, used(full, example), example)
    else:
        check_halved(full, small, example)
    check_trains(case, full, small, example)


def check_like_half(half: nn.Module, small: nn.Module, names: set[str], example: Any) -> None:
    """Check that these tensors, and the output, are as in the model that its constructor makes half as wide."""
    wanted, found = held(half), held(small)
    check(wanted.keys() == found.keys(), f"other tensors: {sorted(wanted.keys() ^ found.keys())[:3]}")
    for name in (name for name in found if name in names):
        old, new = tuple(wanted[name].shape), tuple(found[name].shape)
        check(old == new, f"{name} has shape {new}, in a model built half as wide {old}")
        with torch.no_grad():
            wanted[name].copy_(found[name])
    half.eval(), small.eval()
    for expected, got in zip(outputs(half, example), outputs(small, example), strict=True):
        check(expected.shape == got.shape, f"output {tuple(got.shape)}, of a model built half as wide {expected.shape}")
        error = (expected - got).abs().max().item() if expected.is_floating_point() and expected.numel() else 0.0
        check(error < 1e-4, f"the output differs by {error:.2g} from that of a model built half as wide")


def held(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those too that are not in the state dict."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def used(model: nn.Module, example: Any) -> set[str]:
    """Return the names of the parameters and buffers that a forward pass uses; the others may keep their widths."""
    names: dict[int, set[str]] = {}
    for modules in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in modules:
            names.setdefault(id(tensor), set()).add(name)
    seen: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            for tensor in tensors([args, kwargs or {}]):
                seen.update(names.get(id(tensor), ()))
            return func(*args, **(kwargs or {}))

    model.eval()
    with Watch():
        outputs(model, example)
    return seen


def check_halved(full: nn.Module, small: nn.Module, example: Any) -> None:
    """Every linear and convolution layer is half as wide at both ends, as far as its ends are hidden widths."""
    try:
        found = surgery.widths(full, example, 0.5)
    except surgery.SurgeryError:
        found = []
    whole: dict[tuple[str, int], list[str]] = {}
    for width in found:
        for member in width.members:
            whole.setdefault(member, []).append(width.reason)
    after = dict(small.named_modules())
    classes = {getattr(full, "num_classes", 1000), 1000}
    for name, module in full.named_modules():
        if not isinstance(module, nn.Linear | nn.modules.conv._ConvNd) or name not in after:
            continue
        transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
        groups = (getattr(module, "groups", 1), getattr(after[name], "groups", 1))
        for axis in (0, 1):
            side = groups if axis == (0 if transposed else 1) else (1, 1)
            old, new = module.weight.shape[axis] * side[0], after[name].weight.shape[axis] * side[1]
            reasons = whole.get((f"{name}.weight", axis))
            if reasons is None and found:
                rightly = True  # single positions, which cannot shrink
            elif reasons is None:
                rightly = old in ({3} if axis else classes)
            else:
                rightly = all(any(word in reason for word in RIGHTLY_WHOLE) for reason in reasons)
            if not (halved(old, new) or (new == old and rightly)):
                why = next((f": {reason}" for reason in reasons or () if reason and new == old), "")
                raise Miss(f"axis {axis} of {name}.weight went from {old} to {new}{why}")


def halved(old: int, new: int) -> bool:
    """Half, rounded up; or a product one digit of which is, or a sum of at most 8 terms that are."""
    digit = any(old % d == 0 and old // d * math.ceil(d / 2) == new for d in range(2, old + 1))
    return old == new == 1 or digit or (new < old and 0 <= new - math.ceil(old / 2) < 8)


def check_trains(case: Case, full: nn.Module, small: nn.Module, example: Any) -> None:
    """Check that the output keeps its shape, and that a training step has finite numbers."""
    full.eval(), small.eval()
    shapes = [case.shapes(outputs(model, example)) for model in (full, small)]
    check(shapes[0] == shapes[1], "another output shape")
    small.train()
    training = case.training(small) if case.training else example
    loss = sum(t.float().square().mean() for t in tensors(call(small, training)) if t.is_floating_point())
    loss.backward()
    check(math.isfinite(loss.item()), "the loss is not finite")
    gradients = [p.grad for p in small.parameters() if p.grad is not None]
    check(bool(gradients) and all(finite(g) for g in gradients), "a gradient is not finite")


def check(condition: bool, reason: str) -> None:
    """Miss unless the condition holds."""
    if not condition:
        raise Miss(reason)


def finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite."""
    return bool(tensor.isfinite().all())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    return a.dtype == b.dtype and torch.equal(a, b)


JUDGES = {
    "decompose": decompose, "shuffle": shuffle, "graft": graft, "narrow": narrow, "torch_pruning": torch_pruning
}  # fmt: skip
