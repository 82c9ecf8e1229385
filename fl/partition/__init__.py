"""Partitions: all ways to divide samples among clients, by name.

kind.py                Kind, what is said of one, its Task, and Partition, what it gives
split.py               Parts and Splits: the samples of many clients in a few tensors
unlabelled.py          iid, contiguous, natural
classes.py             shards, clusters
dirichlet.py           dirichlet: shares of the clients, class by class
dirichlet_mixture.py   dirichlet_mixture: shares of the classes, client by client
dirichlet_sizes.py     dirichlet_sizes: shares of all samples
"""

from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
from torch import Tensor

from fl.base.errors import FLError
from fl.base.plugins import check_takes, collect, describe_failure, find, is_path, load_entry_points
from fl.base.plugins import kind as kind_of
from fl.base.settings import choice
from fl.partition.kind import Kind, Partition, Task, counts
from fl.partition.split import Parts, Split, Splits, hold_out

__all__ = [
    "KINDS",
    "Kind",
    "Partition",
    "Parts",
    "Split",
    "Splits",
    "check_text_kind",
    "counts",
    "deal",
    "hold_out",
    "overview",
]


def _check(candidate: Any, name: str = "") -> Kind:
    """Return a kind, or a function of a task as a kind; else raise FLError."""
    if isinstance(candidate, Kind):
        return candidate
    if not callable(candidate) or isinstance(candidate, type):
        raise FLError(f"is {kind_of(candidate)}: name a Kind, or a function of a Task that returns a Partition")
    check_takes("", candidate, "task")
    return Kind(wraps(candidate)(lambda task, options: candidate(task)))


def _kinds() -> dict[str, Kind]:
    """Return the kinds of this folder's files, and of installed packages."""
    ours = collect("fl.partition", "KIND", Kind)
    return ours | load_entry_points("partitions", ours, _check)


KINDS: dict[str, Kind] = _kinds()
"""Name -> what its file, or a package, declares. One that was given by its import path has this path as its name."""


def import_kind(path: str) -> Kind:
    """Import a kind, or a function of a task, by path, without adding it to `KINDS`.

    Raises:
        FLError: for a path of neither.

    >>> try:
    ...     import_kind("fl.partition.unlabelled:KIND")
    ... except FLError as error:
    ...     print(error)
    --partition fl.partition.unlabelled:KIND is a dict: name a Kind, or a function ...
    """
    target = find("partitions", path)
    try:
        return _check(target)
    except FLError as wrong:
        raise FLError(f"--partition {path} {wrong}", code=wrong.code) from None


def deal(
    labels: Tensor,
    kind: str,
    clients: int,
    rng: np.random.Generator,
    minimum: int = 10,
    owners: Tensor | None = None,
    **options: Any,
) -> Partition:
    """Partition samples among clients.

    Args:
        labels: int64 [N]; [N, T] for text, [N, H, W] for masks and float32 [N, D] for numbers, which only some kinds
            can partition.
        kind: one of `KINDS`, or an import path.
        rng: the partition is a function of it and the other arguments.
        minimum: samples that every client must have.
        owners: the natural owner of each sample, int64 [N]; None for data without owners.
        options: the kind's, see `Kind.options`, if they are not the defaults.

    Raises:
        FLError: for an unknown kind, and for data that cannot be divided like this.

    >>> import torch
    >>> parts, structure = deal(torch.zeros(7), "contiguous", 3, np.random.default_rng(0), minimum=1)
    >>> [part.tolist() for part in parts]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    if is_path(kind) and kind not in KINDS:
        KINDS[kind] = import_kind(kind)
    choice("partition", [kind], KINDS)
    if labels.ndim > 1:
        several = "samples have one for each token or pixel"
        check_text_kind(kind, "these are no classes" if labels.is_floating_point() else several)
    if clients > len(labels):
        raise FLError(f"{len(labels):,} samples cannot be divided among {clients:,} clients: use fewer --clients")
    chosen = KINDS[kind]
    if strange := options.keys() - {*chosen.reads}:
        raise TypeError(f"partition {kind} has no option {min(strange)!r}")
    settings = replace(chosen.options, **options) if options else chosen.options
    try:
        dealt = chosen.deal(Task(labels, owners, clients, minimum, rng), settings)
    except Exception as error:
        if isinstance(error, FLError) or not is_path(kind):
            raise
        raise FLError(f"--partition {kind} fails: {describe_failure(error)}", code="run") from None
    if not isinstance(dealt, Partition):
        raise FLError(f"--partition {kind} returns {kind_of(dealt)}: let it return a Partition", code="run")
    parts = Parts.of(dealt.parts)
    strange = parts.samples[(parts.samples < 0) | (parts.samples >= len(labels))]
    if len(parts) != clients or len(strange):
        wrong = f"sample {strange[0]}" if len(strange) else f"{len(parts)} parts"
        raise FLError(
            f"--partition {kind} makes {wrong} of {len(labels):,} samples for {clients:,} clients", code="run"
        )
    if is_path(kind):  # ours give no sample to a client twice
        pairs, counts = (parts.owners * len(labels) + parts.samples).unique(return_counts=True)
        if len(twice := pairs[counts > 1]):
            client, sample = divmod(int(twice[0]), len(labels))
            raise FLError(
                f"--partition {kind} gives sample {sample} to client {client} more than once: give each of a client's "
                "samples once, since some are held out for its tests",
                code="run",
            )
    return dealt._replace(parts=parts)


def check_text_kind(kind: str, why: str = "text has none") -> None:
    """Raise FLError for a partition that depends on class labels.

    Text, masks and numbers to predict have none.
    """
    if not KINDS[kind].text:
        able = ", ".join(name for name, candidate in KINDS.items() if candidate.text)
        hint = ", or make it a Kind(..., text=True) if it does not" * is_path(kind)
        raise FLError(f"--partition {kind} depends on class labels, and {why}: choose {able}{hint}", code="unsupported")


def overview() -> str:
    """List the names of all partitions with a few words on each, for --help.

    >>> overview().split("; ")[-1]
    'text allows contiguous, dirichlet_sizes, iid and natural only'
    """
    every = ", ".join(f"{name} ({kind.about})" if kind.about else name for name, kind in KINDS.items())
    *first, last = (name for name, kind in KINDS.items() if kind.text)
    return f"{every}; your own: module:KIND; text allows {', '.join(first)} and {last} only"
