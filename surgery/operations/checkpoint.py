"""A checkpoint with its model, which is built only for operations that run it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from inspect import signature
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from surgery.configuration import first_difference, holder_of, made_from, reread
from surgery.errors import SurgeryError, about, first_line
from surgery.files import Checkpoint, open_state
from surgery.forward import call, in_mode, observed
from surgery.lazy import LazyState, pieces_of
from surgery.libraries import example_input, named
from surgery.operations.arguments import own, value_of
from surgery.plan.submodel import Plan
from surgery.states import State, load, owners, shapes_of, state

_FORMS = "timm:NAME, torchvision:NAME, or module:factory of your own, each with arguments if needed (,num_classes=10)"


@dataclass(eq=False, repr=False)
class Model:
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
    >>> Model(LazyState({}), "nothing").described
    False
    """

    values: Any
    what: str
    _: KW_ONLY
    folder: Checkpoint | None = None
    name: str | None = None
    shape: Sequence[int] | None = None
    module: nn.Module | None = None
    plan: Plan | None = None
    checkpoint: Checkpoint | None = None  # as it was opened
    before: Callable[[], None] = lambda: None  # called once the model is built, before what takes long

    def __post_init__(self) -> None:
        if not isinstance(self.values, LazyState):
            self.values = LazyState({key: pieces_of(self.values, key) for key in self.values})

    @classmethod
    def open(cls, path: Path, name: str | None = None, shape: Sequence[int] | None = None) -> "Model":
        """The model of a file or folder."""
        checkpoint = open_state(path)
        if shape is not None and any(size < 1 for size in shape):
            raise SurgeryError(f"an input of the sizes {','.join(map(str, shape))}: give sizes of 1 or more")
        folder = checkpoint if checkpoint.is_folder else None
        return cls(checkpoint, str(path), folder=folder, name=name, shape=shape, checkpoint=checkpoint)

    @property
    def described(self) -> bool:
        """Whether its model is known: made by an earlier operation, named, or described by a folder's config.json."""
        known = self.module is not None or self.name is not None
        return known or (self.folder is not None and (self.folder.path / "config.json").is_file())

    def built(self) -> nn.Module:
        """The model, whose weights mean nothing; from now on `values` have the names of `surgery.state(model)`."""
        if self.module is None:
            module = build(self.name, self.folder).eval()
            try:
                self.values = state_for(module, self.values, self.what, self.name)
            except SurgeryError:
                converted = None if self.name or self.folder is None else _converted(module, self.folder)
                if converted is None:
                    raise
                self.values = LazyState({key: pieces_of(converted, key) for key in converted}, self.what)
            self.module = module
            self.before()
        return self.module

    def loaded(self) -> nn.Module:
        """The model with these weights, all of which are read."""
        net = self.built()
        with about(self.what):
            return load(net, dict(self.values))

    def example(self) -> Any:
        """An input of the model, on which it runs."""
        example = example_for(self.built(), self.shape)
        check_runs(self.built(), example, self.shape)
        return example

    def run_arguments(self) -> dict[str, Any]:
        """What functions that follow the model are given: an example, and what of its output counts."""
        return {"example": self.example(), "output": output_for(self.built())}

    def becomes(
        self, values: Mapping[str, Tensor], module: nn.Module | None = None, plan: Plan | None = None
    ) -> "Model":
        """What an operation makes of it; the files beside the weights and the shape of an input stay."""
        return Model(values, "the result", folder=self.folder, shape=self.shape, module=module, plan=plan)

    def alike(self, values: Mapping[str, Tensor], plan: Plan | None = None) -> "Model":
        """Other tensors of the same model."""
        made = self.becomes(values, self.module, plan)
        made.name = self.name
        return made

    def config(self) -> dict | None:
        """What config.json says of the model, if an operation has looked at it; None otherwise.

        Raises:
            SurgeryError: if the model's class would make other tensors of it, so that it could not read its weights.
        """
        config = getattr(self.module, "config", None)
        text = getattr(config, "to_json_string", None)
        known = json.loads(text()) if callable(text) else None
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
                    "file, --out NAME.safetensors, and a --plan, by which Plan.build makes the model; or choose "
                    "what it can say: prune has --even, --heads and --rounding, which keep layers alike"
                )
        return known


Built = Annotated[Model, "folders of transformers' models need none"]
"""A checkpoint whose model is run; what --help says of its --model."""
InBlocks = Annotated[
    Model, "needed unless the tensors' names show a Sequential's blocks, or those of a model of the zoo"
]
"""A checkpoint whose blocks the names of its tensors show, or else its model."""


def build(name: str | None, checkpoint: Checkpoint | None = None) -> nn.Module:
    """The model of a name, or the one that a HuggingFace folder's config.json describes; its weights are random.

    Args:
        name: timm:NAME, torchvision:NAME or MODULE:FACTORY, where modules are also looked for in the working directory;
            arguments of the factory may follow, `timm:resnet18,num_classes=10`.
        checkpoint: used if there is no name.

    Raises:
        SurgeryError: if there is no such model, or it cannot be built.
    """
    if name is None:
        return _described(checkpoint)
    called, *rest = name.split(",")
    arguments = {}
    for text in rest:
        key, equals, value = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise SurgeryError(f"--model {name}: write arguments as NAME=VALUE, such as num_classes=10")
        arguments[key.strip()] = value_of(value)
    module, _, factory = called.partition(":")
    if module in ("timm", "torchvision"):
        return named(called, **arguments)
    if not module or not factory:
        raise SurgeryError(f"--model {name}: give {_FORMS}")
    made = own(called, "--model")
    try:
        made = made(**arguments)
    except Exception as error:  # whatever the user's code raises
        what = f"{type(error).__name__}: {first_line(error)}"
        raise SurgeryError(f"--model {called} cannot be built: {what}") from error
    if not isinstance(made, nn.Module):
        raise SurgeryError(f"--model {called} gives a {type(made).__name__}, and should give a torch.nn.Module")
    return made


def _described(checkpoint: Checkpoint | None) -> nn.Module:
    found = None if checkpoint is None else checkpoint.config
    if found is None:
        raise SurgeryError(f"this needs the model, of which the checkpoint holds tensors only: give --model {_FORMS}")
    file = checkpoint.path / "config.json"
    try:
        import transformers

        names = found["architectures"]
        config = transformers.AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
        return getattr(transformers, names[0])(config)
    except ImportError:
        raise SurgeryError(f"{file} describes a model of transformers, which is not installed: give --model") from None
    except Exception as error:  # transformers' own, of all kinds
        raise SurgeryError(f"{file} describes no model that can be built ({first_line(error)}): give --model") from None


def _converted(model: nn.Module, folder: Checkpoint) -> State | None:
    """The state of a folder as transformers reads it, which renames and joins the tensors of many classes' files; they
    are all read. None if some tensor is missing or unknown to it, too.
    """
    try:
        given = {"local_files_only": True, "dtype": "auto", "output_loading_info": True}
        kind: Any = type(model)
        loaded, report = kind.from_pretrained(folder.path, **given)
    except Exception:  # transformers' own, of all kinds, or a class without it
        return None
    return None if any(report[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched")) else state(loaded)


def state_for(model: nn.Module, values: LazyState, what: str, called: str | None = None) -> LazyState:
    """The values under the names of `surgery.state(model)`; of tied tensors the first name that is there is taken.

    Args:
        called: the model as --model names it.

    Raises:
        SurgeryError: that begins with `what`, if a tensor of the model is missing or has another shape, or one of the
            values is unknown.
    """
    first_names = {tensor.data_ptr() if tensor.numel() else id(tensor): name for name, tensor in state(model).items()}
    places = {name: name for name in state(model)}
    tied = model.state_dict()
    for name, tensor in tied.items():
        first = first_names.get(tensor.data_ptr())
        if name not in places and first and first not in values and name in values:
            places[first] = name
    kind, way_out = called or type(model).__name__, "give the --model that it was saved from, with its arguments"
    if missing := [name for name, place in places.items() if place not in values]:
        many = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise SurgeryError(f"{what} has no {missing[0]!r}{many}, which {kind} has: {way_out}")
    if extra := [name for name in values if name not in places.values() and name not in tied]:
        many = f" and {len(extra) - 1} more tensors" if len(extra) > 1 else ""
        raise SurgeryError(f"{what} has {extra[0]!r}{many}, which {kind} does not have: {way_out}")
    found = LazyState({name: values.pieces(place) for name, place in places.items()}, what)
    sizes, has = shapes_of(model), {name: found.pieces(name).shape for name in places}
    if odd := [name for name in places if has[name] != sizes[name]]:
        if classes := _classes(model, {name: (has[name], sizes[name]) for name in odd}):
            there, here = classes
            reason = f"{what} has {there} classes, and {kind} has {here}"
            way_out = f"give a --model with {there} classes"
            if (called or "").startswith(("timm:", "torchvision:")):
                rest = [part for part in called.split(",") if not part.startswith("num_classes")]
                way_out = f"give --model {','.join(rest)},num_classes={there}"
            raise SurgeryError(f"{reason} ({odd[-1]!r}): {way_out}")
        raise SurgeryError(f"{what} has {odd[0]!r} of shape {has[odd[0]]}, and {kind} of {sizes[odd[0]]}: {way_out}")
    return found


def _classes(model: nn.Module, odd: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[int, int] | None:
    """The numbers of classes of a checkpoint and a model, if that is what all shapes that differ differ in."""
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    pairs = {(a[0], b[0]) for a, b in odd.values() if a and b and a[1:] == b[1:]}
    alike = all(a[:1] and b[:1] and a[1:] == b[1:] for a, b in odd.values())
    return pairs.pop() if alike and len(pairs) == 1 and not tables & odd.keys() else None


def check_runs(model: nn.Module, example: Any, shape: Sequence[int] | None) -> None:
    """SurgeryError, which says what to do on the command line, unless a model runs on an example of `example_for`."""
    hint = "; give the shape of one input as --input, without the batch"
    if shape is not None:
        given, seen = (",".join(map(str, sizes)) for sizes in (shape, (2, *shape)))
        hint = f"; --input {given} is one input without the batch, so that the model got {seen}"

    def run(net: nn.Module, given: Any) -> None:
        with in_mode(net, training=False):
            call(net, given)

    observed(model, example, run, hint)


def output_for(model: nn.Module) -> Callable[[Any], Any] | None:
    """What of a model's output counts; None: all of it.

    Of an encoder with a decoder it is the decoder's result: the encoder's is returned beside it, and is a hidden one.
    """
    return itemgetter(0) if getattr(getattr(model, "config", None), "is_encoder_decoder", False) else None


def example_for(model: nn.Module, shape: Sequence[int] | None) -> Any:
    """An input of a model: zeros of the given shape (without the batch), tokens for models that begin with a table.

    One for an encoder and a decoder also has tokens that the decoder reads.
    """
    main, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    tokens = torch.ones(2, *(shape or (8,)), dtype=torch.long)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in signature(model.forward).parameters:
        given = tokens
        if main != "input_ids":
            encoder: Any = model
            given = torch.zeros(2, *shape) if shape else example_input(encoder.get_encoder())
        elif isinstance(end := getattr(config, "eos_token_id", None), int):
            tokens[..., -1] = end  # after which classifiers look
        return {main: given, "decoder_input_ids": torch.ones(2, 8, dtype=torch.long)}
    if main == "input_ids":
        return {"input_ids": tokens}
    first = next((module for _, module, _ in owners(model)), None)
    if isinstance(first, nn.Embedding) and len(shape or (8,)) == 1:
        return torch.zeros(2, *(shape or (8,)), dtype=torch.long)
    return example_input(model) if shape is None else torch.zeros(2, *shape)
