"""A checkpoint with its model, which is built only for operations that run it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from surgery.configuration import first_difference, holder_of, made_from, reread, shapes_of
from surgery.errors import SurgeryError, first_line
from surgery.files import Checkpoint, open_state
from surgery.lazy import LazyState, pieces_of
from surgery.operations.models import build, config_of, example_for, state_for
from surgery.plan import Submodel
from surgery.states import load


class Subject:
    """What an operation works on, and what it gives: tensors, and the model to which they belong, if it is known.

    Args:
        values: the tensors; they are read when they are asked for.
        what: what errors call it.
        folder: a HuggingFace folder from which the files beside the weights are taken.
        name: of the model, as --model takes it.
        shape: of one input, without the batch.
        module: the model, whatever its weights are.
        plan: by which it lies in what it was made from, or that in it.

    >>> import torch
    >>> Subject(LazyState({}), "nothing").described
    False
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        what: str,
        *,
        folder: Checkpoint | None = None,
        name: str | None = None,
        shape: Sequence[int] | None = None,
        module: nn.Module | None = None,
        plan: Submodel | None = None,
    ) -> None:
        lazy = isinstance(values, LazyState)
        self.values = values if lazy else LazyState({key: pieces_of(values, key) for key in values})
        self.what, self.folder, self.name, self.shape = what, folder, name, shape
        self.module, self.plan = module, plan
        self.checkpoint: Checkpoint | None = None  # as it was opened
        self.before: Callable[[], None] = lambda: None  # called once the model is built, before what takes long

    @classmethod
    def open(cls, path: Path, name: str | None = None, shape: Sequence[int] | None = None) -> "Subject":
        """The subject of a file or folder."""
        checkpoint = open_state(path)
        if shape is not None and any(size < 1 for size in shape):
            raise SurgeryError(f"an input of the sizes {','.join(map(str, shape))}: give sizes of 1 or more")
        folder = checkpoint if checkpoint.is_folder else None
        subject = cls(checkpoint, str(path), folder=folder, name=name, shape=shape)
        subject.checkpoint = checkpoint
        return subject

    @property
    def described(self) -> bool:
        """Whether its model is known: made by an earlier operation, named, or described by a folder's config.json."""
        known = self.module is not None or self.name is not None
        return known or (self.folder is not None and (self.folder.path / "config.json").is_file())

    def built(self) -> nn.Module:
        """The model, whose weights mean nothing; from now on `values` have the names of `surgery.state(model)`."""
        if self.module is None:
            module = build(self.name, self.folder).eval()
            self.values = state_for(module, self.values, self.what)
            self.module = module
            self.before()
        return self.module

    def loaded(self) -> nn.Module:
        """The model with these weights, all of which are read."""
        net = self.built()
        try:
            return load(net, dict(self.values))
        except SurgeryError as error:
            raise SurgeryError(f"{self.what}: {error}") from None

    def example(self) -> Any:
        """An input of the model."""
        return example_for(self.built(), self.shape)

    def becomes(
        self, values: Mapping[str, Tensor], module: nn.Module | None = None, plan: Submodel | None = None
    ) -> "Subject":
        """What an operation makes of it; the files beside the weights and the shape of an input stay."""
        return Subject(values, "the result", folder=self.folder, shape=self.shape, module=module, plan=plan)

    def alike(self, values: Mapping[str, Tensor], plan: Submodel | None = None) -> "Subject":
        """Other tensors of the same model."""
        made = self.becomes(values, self.module, plan)
        made.name = self.name
        return made

    def config(self) -> dict | None:
        """What config.json says of the model, if an operation has looked at it; None otherwise.

        Raises:
            SurgeryError: if the model's class would make other tensors of it, so that it could not read its weights.
        """
        known = None if self.module is None else config_of(self.module)
        holder = None if known is None else holder_of(self.module)
        if holder is not None:
            try:
                made = made_from(type(self.module), reread(getattr(self.module, holder)))
                what = first_difference(shapes_of(self.module), shapes_of(made))
            except Exception as error:  # whatever the class raises
                what = f"its class raises {type(error).__name__} for it: {first_line(error)}"
            if what:
                raise SurgeryError(
                    f"no config.json describes {self.what} ({what}), so that from_pretrained would refuse it: give a "
                    "file, --out NAME.safetensors, and a --plan, by which Submodel.build makes the model"
                )
        return known
