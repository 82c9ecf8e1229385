"""Other vocabularies: keep some tokens, or add new ones; each is a plan."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.forward import ghost_of
from surgery.plan import Plan, Source, structure
from surgery.rows import keep_rows, plan_of_rows, tensors_along
from surgery.states import shapes_of, state
from surgery.vocabulary.tables import Tables, number_edits, size_edits, tables_of
from surgery.vocabulary.tokens import extend, reduced

Rows = Literal["mean", "zeros"] | Sequence[Sequence[int]]


class Resized(NamedTuple):
    """A model with another vocabulary.

    Attributes:
        model: the model.
        plan: where its tensors lie in the full one.
        tokenizer: the tokenizer with the new numbers of tokens, or None if none was given.
    """

    model: nn.Module
    plan: Plan
    tokenizer: Any = None


def keep(
    model: nn.Module, tokens: Iterable[int], *, tokenizer: Any = None, modules: Sequence[str] | None = None
) -> Resized:
    """Keep some of a model's tokens: their rows of the embedding, head and bias.

    The tokens keep their order: the smallest number that is kept becomes 0. The logits of the tokens that are kept
    equal the full model's. Numbers of special tokens (`pad_token_id`, `padding_idx`) in modules and configurations
    become the new ones, and sizes (`vocab_size`) follow, so that `from_pretrained` reads what `save_pretrained` writes.

    Args:
        model: any module with an embedding of tokens; it is not changed. A head may be tied to it.
        tokens: the numbers of the tokens to keep. `surgery.vocabulary.needed` gives the tokens of texts.
        tokenizer: of transformers (a fast one) or of tokenizers; it is not changed. A text that the full
            tokenizer cuts into kept tokens is cut into the same ones.
        modules: names or patterns of the modules with one row for each token, if they are not found.

    Raises:
        SurgeryError: for a special token of the configuration or the tokenizer that is not kept; for tokens that the
            merges of the tokenizer (BPE) need, and for a tokenizer of another kind; for numbers that are no tokens; if
            it is not known which embedding or which head has the tokens.

    >>> import torch
    >>> net = nn.Sequential(nn.Embedding(9, 4, padding_idx=2), nn.Linear(4, 4), nn.Linear(4, 9))
    >>> small, plan, _ = keep(net, [2, 3, 7])
    >>> small[0], small[2]
    (Embedding(3, 4, padding_idx=0), Linear(in_features=4, out_features=3, bias=True))
    >>> torch.equal(small[0].weight[2], net[0].weight[7])
    True
    """
    tables = tables_of(model, modules)
    numbers = _numbers(tokens, tables.size)
    small = None if tokenizer is None else reduced(tokenizer, numbers)
    first = _renumber(model, tables, numbers)
    ghost = first.build_unchecked(ghost_of(model)) if first.edits else model
    plan = first.compose(_plan(ghost, tables, numbers))
    return Resized(plan.build_unchecked(model), plan, small)


def grow(
    model: nn.Module,
    size: int | None = None,
    *,
    rows: Rows = "mean",
    tokens: Sequence[str] = (),
    tokenizer: Any = None,
    modules: Sequence[str] | None = None,
) -> Resized:
    """Add tokens to the end of a model's vocabulary; the logits of the old ones stay.

    Args:
        model: as for `surgery.vocabulary.keep`.
        size: how many tokens there are then. Left out, as many as the tokenizer has with the new `tokens`.
        rows: what the embedding, the head and its bias have for a new token: the mean of the old rows, zeros, or for
            each new token the numbers of old ones, of whose rows it is the mean (the pieces that it replaces).
        tokens: texts of new tokens for the tokenizer.
        tokenizer: as for `surgery.vocabulary.keep`; it is not changed. Needed for `tokens`.
        modules: as for `surgery.vocabulary.keep`.

    Returns:
        The model, the plan and the tokenizer. A mean lies nowhere in the full model: in `plan` new rows are copies of
        the last old one, or of the first of a token's numbers in `rows`, and `plan.embed` writes old rows alone.

    Raises:
        SurgeryError: for a size below the old one, and as for `surgery.vocabulary.keep`.

    >>> import torch
    >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    >>> large, plan, _ = grow(net, 10)
    >>> torch.allclose(large[0].weight[9], net[0].weight.mean(0)), torch.equal(large[1].bias[:9], net[1].bias)
    (True, True)
    """
    tables = tables_of(model, modules)
    if tokens and tokenizer is None:
        raise SurgeryError("tokens are texts for a tokenizer: give it, or the size alone", code="argument")
    large = extend(tokenizer, tokens) if tokenizer is not None else None
    if size is None:
        if large is None:
            raise SurgeryError("give the new size, or tokens with their tokenizer", code="argument")
        size = max(tables.size, large.get_vocab_size() if hasattr(large, "get_vocab_size") else len(large))
    if not isinstance(size, int) or isinstance(size, bool) or size < tables.size:
        raise SurgeryError(
            f"size={size!r} of a model with {tables.size} tokens: give as many or more, or use vocabulary.keep",
            code="argument",
        )
    added = size - tables.size
    if isinstance(rows, str) or not isinstance(rows, Sequence):
        if rows not in ("mean", "zeros"):
            raise SurgeryError(f"rows are 'mean', 'zeros' or lists of tokens, got {rows!r}", code="argument")
        like = [[tables.size - 1]] * added
    else:
        like = [_numbers(row_numbers, tables.size) for row_numbers in rows]
        if len(like) != added:
            raise SurgeryError(f"rows has {len(like)} lists of tokens for {added} new ones", code="argument")
    plan = _plan(model, tables, [*range(tables.size), *(row_numbers[0] for row_numbers in like)])
    grown = plan.build_unchecked(model)
    values = state(grown)  # of tensors of its own
    for name, (_, axis) in tensors_along(model, tables.axes).items():
        if added and values[name].is_floating_point():
            _fill(values[name].movedim(axis, 0), tables.size, rows if isinstance(rows, str) else like)
    return Resized(grown, plan, large)


def _fill(table: Tensor, old: int, rows: str | list[list[int]]) -> None:
    """Set the rows of new tokens, in place."""
    if rows == "zeros":
        table[old:] = 0
    elif rows == "mean":
        table[old:] = table[:old].double().mean(0).to(table)
    else:
        for place, sources in enumerate(rows, old):
            table[place] = table[list(sources)].double().mean(0).to(table)


def _numbers(tokens: Any, size: int) -> list[int]:
    """Return the numbers of tokens in ascending order, each once."""
    listed = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    numbers = list(listed) if isinstance(listed, Iterable) and not isinstance(listed, str | bytes) else []
    whole = [int(n) for n in numbers if hasattr(n, "__index__") and not isinstance(n, bool)]
    wrong = len(whole) < len(numbers) or any(not 0 <= n < size for n in whole)
    if not whole or wrong:
        shown = next((n for n in numbers if n not in range(size)), tokens)
        raise SurgeryError(f"{shown!r}: give numbers of the {size} tokens, from 0 on, at least one", code="argument")
    return sorted(set(whole))


def _renumber(model: nn.Module, tables: Tables, numbers: Sequence[int]) -> Plan:
    """Return the plan of the same model with new numbers of special tokens."""
    values = state(model)
    entries = {name: (Source(name, (None,) * tensor.ndim),) for name, tensor in values.items()}
    dtypes = {name: tensor.dtype for name, tensor in values.items()}
    return Plan(entries, shapes_of(values), tuple(number_edits(model, tables, numbers)), structure(model), dtypes)


def _plan(model: nn.Module, tables: Tables, positions: Sequence[int]) -> Plan:
    """Return the plan of a model whose tokens are these of the full one's."""
    whole = {name: Source(name, (None,) * tensor.ndim) for name, tensor in state(model).items()}
    rows, edits = keep_rows(model, tables.axes, positions)
    return plan_of_rows(model, whole | rows, [*edits, *size_edits(model, tables, len(positions))])
