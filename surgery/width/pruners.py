"""torch-pruning's importance classes, called with groups like those that torch-pruning makes."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from surgery.errors import SurgeryError, first_line
from surgery.names import joined
from surgery.width.scores import occurrences
from surgery.width.solved import Atom, Solution


def is_pruner(by: Any) -> bool:
    """Whether this is an object of one of torch-pruning's importance classes."""
    module = sys.modules.get("torch_pruning.pruner.importance")  # whoever has such an object has imported it
    return module is not None and isinstance(by, module.Importance)


def pruner_scores(model: nn.Module, solution: Solution, by: Any) -> dict[Atom, Tensor]:
    """What torch-pruning's class says of each width; a width of which it says nothing is left out.

    torch-pruning's group lists every layer that has a width with the positions in the layer, and for each the position
    of the width (`root_idxs`). It lists an attention's layer once, with the positions of all heads; here each head is
    an item of its own, so that every item is as long as the width. Their sums are the same. Their means are smaller by
    one factor for the width, which every `normalizer` but None takes out again. FPGMImportance, which compares the
    positions of an item with each other, compares those of one head only.
    """
    from torch_pruning.dependency import Dependency, Group, Node

    scores = {}
    for atom in solution.members:
        group = Group()
        for name, layer, handler, rows in _items(model, solution, atom):
            node = Node(layer, None, name)
            for row in rows:
                group.add_dep(Dependency(handler, handler, node, node), row)
                group[-1].root_idxs = list(range(atom.size))
        if atom.why or atom.size == 1 or not len(group):
            continue
        try:
            values = by(group)
        except Exception as error:
            layer = group[0].dep.target.module
            hint = "; it may need gradients in p.grad" if any(p.grad is None for p in layer.parameters()) else ""
            why = f"{first_line(error)}{hint}"
            raise SurgeryError(f"{type(by).__name__} fails for a width of {layer}: {why}") from error
        if values is not None:
            scores[atom] = torch.as_tensor(values).detach().cpu().double()
    return scores


def _items(model: nn.Module, solution: Solution, atom: Atom) -> Iterator[tuple[str, nn.Module, Any, list[list[int]]]]:
    """(tensor name, layer, torch-pruning's function that cuts it there, positions for each time the atom occurs)."""
    from torch_pruning import ops
    from torch_pruning.pruner.function import PrunerBox

    seen: set[tuple[int, int]] = set()
    for (name, attribute), position in solution.members[atom]:
        layer = model.get_submodule(name)
        kind = ops.module2type(layer)
        if attribute != "weight" or kind not in PrunerBox or (id(layer), position) in seen:
            continue
        seen.add((id(layer), position))
        weight = layer.weight
        transposed = getattr(layer, "transposed", False) or kind == ops.OPTYPE.EMBED
        is_output = weight.ndim == 1 or position == int(transposed)
        if position > 1:
            continue
        rows = occurrences(solution.tensors[name, attribute][position], atom)
        groups = getattr(layer, "groups", 1)
        if isinstance(layer, nn.modules.conv._ConvNd) and position == 1 and groups > 1:  # once for each group
            rows = torch.cat([rows + group * weight.shape[1] for group in range(groups)])
        cut = PrunerBox[kind]
        yield (
            joined(name, attribute),
            layer,
            cut.prune_out_channels if is_output else cut.prune_in_channels,
            rows.tolist(),
        )
