"""Scores of blocks, for `surgery.ungraft`."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from surgery.copying import clone
from surgery.depth.sections import sections
from surgery.errors import SurgeryError, explain
from surgery.forward import as_batches, call, check_runs, copy_tensors, tensors_in


def score_blocks(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    example: Any = None,
) -> dict[str, Tensor]:
    """Return scores of each section's blocks, [blocks]; infinity for those that stay.

    Args:
        model: any module with blocks that run one after another; a copy of it runs in evaluation mode.
        batches: inputs as for `surgery.narrow`; with `loss`, what it takes.
        loss: from a model and a batch to a number. A block's score is how much the mean loss grows without it. None:
            the score is 1 - the mean cosine of a block's input and output, of tokens [..., features] along the
            features, of images over all of a sample (Men et al., "ShortGPT", 2024, equation 1).
        example: an input, for what batches with labels are; the first batch if it is not given.

    Raises:
        SurgeryError: for a model without sections, and where the model or the loss fails.

    >>> import surgery
    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> net = nn.Sequential(nn.Linear(2, 4), block(), block(), block(), nn.Linear(4, 2))
    >>> scores = score_blocks(net, [torch.randn(8, 2)])
    >>> keep = {name: values.topk(2).indices.sort().values.tolist() for name, values in scores.items()}
    >>> len(surgery.ungraft(net, keep=keep, stands_for="none")[0])
    4
    """
    batches = as_batches(batches, "score_blocks")
    example = batches[0] if example is None else example
    check_runs(model, example, "score_blocks")
    all_sections = sections(model, example=example)
    if not all_sections:
        raise SurgeryError(f"{type(model).__name__} has no sections of blocks to score", code="depth")
    twin = clone(model).eval()
    names = [block for section in all_sections for block in section.blocks]
    influence = _influences(twin, names, batches if loss is None else [example])
    if loss is not None:

        def mean(where: str) -> float:
            with explain(f"loss(model, batch) fails {where}"), torch.no_grad():
                return sum(float(loss(twin, batch)) for batch in batches) / len(batches)

        full = mean("for the full model")
        for name in [name for name in names if influence[name] < torch.inf]:
            handle = twin.get_submodule(name).register_forward_hook(_leave_out, with_kwargs=True)
            influence[name] = mean(f"without {name!r}") - full
            handle.remove()
    return {section.name: torch.tensor([influence[block] for block in section.blocks]) for section in all_sections}


def _influences(model: nn.Module, names: list[str], batches: list[Any]) -> dict[str, float]:
    """Return 1 - cosine of blocks' inputs and outputs; infinity for other shapes."""
    seen: dict[str, list[float]] = {name: [] for name in names}

    def note(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            before, after = (tensors_in(tree)[0].detach() for tree in ((args, kwargs), output))
            if before.shape != after.shape:
                seen[name].append(torch.inf)
                return
            rows = before.ndim > 3  # of images it is not known along which axis features lie
            first, second = (tensor.flatten(1) if rows else tensor for tensor in (before.float(), after.float()))
            seen[name].append(1 - nn.functional.cosine_similarity(first, second, dim=-1).mean().item())

        return hook

    handles = [model.get_submodule(n).register_forward_hook(note(n), with_kwargs=True) for n in names]
    for number, batch in enumerate(batches):
        with explain(f"{type(model).__name__} does not run on batches[{number}]"), torch.no_grad():
            call(model, copy_tensors(batch))
    for handle in handles:
        handle.remove()
    return {name: sum(values) / len(values) if values else torch.inf for name, values in seen.items()}


def _leave_out(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Return a block's input in the place of its output."""
    first = tensors_in((args, kwargs))[0]
    return (first, *output[1:]) if isinstance(output, tuple) else first
