"""Code that commands share: the checkpoint to read, its model, the one to write."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor, nn
from tqdm import tqdm
from tyro.conf import Positional, arg

from surgery.commands import flags
from surgery.errors import SurgeryError, about, first_line
from surgery.files import Checkpoint, check_absent, check_new, open_state, write
from surgery.forward import call, in_mode, observe
from surgery.inspect.contents import PROVENANCE, size_text
from surgery.lazy import LazyState, Pieces, pieces_of, spans
from surgery.libraries import example_input, make_model
from surgery.plan import Plan, fingerprint
from surgery.states import load, owners, shapes_of, state, ties
from surgery.transformers.folders import config_json, convert, make_inputs, model_of, output_for, why_unreadable

_FORMS = "timm:NAME, torchvision:NAME, or module:factory of your own, each with arguments if needed (,num_classes=10)"


class Model:
    """A checkpoint and its model, which is built when it is first asked for.

    Args:
        path: of the file or folder.
        name: of the model, as --model takes it; a folder of transformers' model needs none.
        shape: of one input, without the batch.

    Attributes:
        values: the tensors, read when they are asked for; once the model is built, by the names of its state.
        module: the model, if it is built; its weights mean nothing.
        folder: the checkpoint if it is a folder, from which the files beside the weights are taken.
    """

    def __init__(self, path: Path, name: str | None = None, shape: Sequence[int] | None = None) -> None:
        if shape is not None and any(size < 1 for size in shape):
            raise SurgeryError(f"--input {','.join(map(str, shape))}: give sizes of 1 or more", code="argument")
        if str(path).startswith(("timm:", "torchvision:")) and not path.exists():
            raise SurgeryError(f"{path} is a model: give a checkpoint's file, and --model {path}", code="argument")
        self.checkpoint = open_state(path)
        self.values: LazyState = self.checkpoint
        self.folder = self.checkpoint if self.checkpoint.is_folder else None
        self.path, self.name, self.shape = path, name, shape
        self.module: nn.Module | None = None

    @property
    def described(self) -> bool:
        """True if the model is known: by its name, or by a folder's config.json."""
        return self.name is not None or (self.folder is not None and (self.folder.path / "config.json").is_file())

    def build(self, module: nn.Module | None = None) -> nn.Module:
        """Build the model, or take the given one; `values` then have the model's names."""
        if self.module is None:
            module = (build(self.name, self.folder) if module is None else module).eval()
            try:
                self.values = state_for(module, self.values, str(self.path), self.name)
            except SurgeryError as error:
                known = (
                    None
                    if error.code == "values" or self.name or self.folder is None
                    else convert(module, self.folder.path)
                )
                if known is None:
                    raise
                self.values = LazyState({key: pieces_of(known, key) for key in known}, str(self.path))
            self.module = module
        return self.module

    def load(self, module: nn.Module | None = None) -> nn.Module:
        """Build the model with these weights, which are all read."""
        net = self.build(module)
        with about(str(self.path)):
            return load(net, dict(self.values))

    def run_arguments(self) -> dict[str, Any]:
        """Return the example, and what of its output counts, for functions that need both."""
        example = example_for(self.build(), self.shape)
        check_runs(self.build(), example, self.shape)
        return {"example": example, "output": output_for(self.build())}

    def source(self) -> dict[str, Any]:
        """Return the record of it: its path, size, and a hash of its names and shapes."""
        shapes = {name: self.checkpoint.pieces(name).shape for name in self.checkpoint}
        return {"path": str(self.path), "bytes": _total(self.checkpoint), "fingerprint": fingerprint(shapes)}


@dataclass(frozen=True)
class CheckpointSource:
    """The checkpoint that a command reads."""

    file: Positional[flags.File]
    """the checkpoint: a .safetensors or .pt file, or a folder as HuggingFace's libraries write it"""
    model: flags.ModelName = None
    """timm:NAME, torchvision:NAME or module:factory (timm:resnet18,num_classes=10); transformers' folders need none"""
    input: flags.OptionalCounts = None
    """shape of one input of the --model, such as 3,224,224 [the one that the model was made for]"""

    def open(self) -> Model:
        """Open it."""
        return Model(self.file, self.model, self.input)


@dataclass(frozen=True)
class Output:
    """The checkpoint that a command writes; nothing may be there before."""

    out: flags.File
    """the new checkpoint: a file, or a folder, which also gets the other files of the given folder"""
    shard_size: Annotated[str | None, flags.optional(metavar="SIZE")] = None
    """in a folder: the size above which it is split into several files, such as 5GB"""

    def __post_init__(self) -> None:
        check_new(self.out)
        size_in_bytes(self.shard_size)

    def write(
        self, values: Mapping[str, Tensor], how: Mapping[str, Any], inputs: Mapping[str, Model], *,
        like: Model | None = None, module: nn.Module | None = None,
    ) -> None:  # fmt: skip
        """Write a checkpoint, with a progress bar on a terminal, and say where it is.

        Args:
            values: its tensors.
            how, inputs: how it was made, and of what, which the file's metadata tell.
            like: whose folder has the files beside the weights.
            module: the model, of whose configuration a folder gets config.json.
        """
        config = None if self.out.suffix else config_of(module)
        text = f"{self.out}: {len(values)} tensor{'s' * (len(values) != 1)}, {size_text(_total(values))}"
        record = {**how, "inputs": {name: model.source() for name, model in inputs.items()}}
        options = {"unit": "B", "unit_scale": True, "leave": False, "disable": None}
        with tqdm(total=_total(values), desc=self.out.name, **options) as bar:
            metadata, folder = {PROVENANCE: json.dumps(record)}, None if like is None else like.folder
            more: dict[str, Any] = {"config": config, "shard_bytes": size_in_bytes(self.shard_size)}
            write(self.out, values, metadata=metadata, like=folder, progress=bar.update, **more)
        print(text)


@dataclass(frozen=True)
class PlannedOutput(Output):
    """The checkpoint that a command writes, and the plan of the smaller in the larger."""

    plan: Annotated[Path | None, flags.optional(metavar="PLAN.json")] = None
    """where to write the plan: how the smaller of the two models lies in the other"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plan is not None:
            check_absent(self.plan)

    def write_plan(self, plan: Plan) -> None:
        """Write the plan, if it is asked for."""
        if self.plan is not None:
            check_absent(self.plan)
            plan.save(self.plan)
            print(f"{self.plan}: {plan!r}")


Flat = arg(name="")
"""The flags of a dataclass, without its name before them."""
From: TypeAlias = Annotated[CheckpointSource, Flat]
To: TypeAlias = Annotated[Output, Flat]
ToPlanned: TypeAlias = Annotated[PlannedOutput, Flat]


def _total(values: Mapping[str, Tensor]) -> int:
    """Count the bytes of a state; a lazy one is not read."""
    return sum(pieces_of(values, name).nbytes for name in values)


def size_in_bytes(text: str | None) -> int | None:
    """Count the bytes that a text such as 5GB says; None for None.

    >>> size_in_bytes("5GB"), size_in_bytes("200 kB")
    (5000000000, 200000)
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", text.strip().lower())
    size = int(float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[match[2]]) if match else 0
    if size < 1:
        raise SurgeryError(f"--shard-size {text}: give a number of bytes, such as 500MB or 5GB", code="argument")
    return size


def plan_of(path: Path) -> Plan:
    """Read a plan; a SurgeryError names the file if it holds none."""
    try:
        return Plan.load(path)
    except OSError as error:
        raise SurgeryError(f"{path} cannot be read: {error.strerror or error}", code="file") from None


def config_of(module: nn.Module | None) -> dict | None:
    """Return what config.json has to say of a model; None if it has no configuration.

    Raises:
        SurgeryError: if the model's class would make other tensors of it, so that it could not read its weights.
    """
    config = None if module is None else config_json(module)
    if module is not None and config is not None and (reason := why_unreadable(module)):
        raise SurgeryError(
            f"no config.json describes the result ({reason}), so that from_pretrained would refuse it: give a file, "
            "--out NAME.safetensors, and a --plan, by which Plan.build makes the model; or choose what it can say: "
            "prune has --even, --heads and --rounding, which keep layers alike",
            code="unsupported",
        )
    return config


def build(name: str | None, checkpoint: Checkpoint | None = None) -> nn.Module:
    """Build the model of a name or of a folder's config.json, with random weights.

    Args:
        name: timm:NAME, torchvision:NAME or MODULE:FACTORY, where modules are also looked for in the working directory;
            arguments of the factory may follow, `timm:resnet18,num_classes=10`.
        checkpoint: used if there is no name.
    """
    if name is None:
        return _describe(checkpoint)
    called, *rest = name.split(",")
    arguments = {}
    for text in rest:
        key, equals, value = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise SurgeryError(f"model {name}: write arguments as NAME=VALUE, such as num_classes=10", code="argument")
        arguments[key.strip()] = flags.value_of(value)
    library, _, factory = called.partition(":")
    if library in ("timm", "torchvision"):
        return make_model(called, **arguments)
    if not library or not factory:
        raise SurgeryError(f"unknown model {name!r}: give {_FORMS}", code="name")
    model = flags.import_object(called, "model")(**arguments)
    if not isinstance(model, nn.Module):
        raise SurgeryError(f"model {called} gives a {type(model).__name__}, not a torch.nn.Module", code="argument")
    return model


def _describe(folder: Checkpoint | None) -> nn.Module:
    config = None if folder is None else folder.config
    if folder is None or config is None:
        raise SurgeryError(f"the checkpoint holds tensors only: give its --model {_FORMS}", code="argument")
    file = folder.path / "config.json"
    try:
        return model_of(folder.path, config["architectures"][0])
    except ImportError:
        raise SurgeryError(f"{file} needs transformers, which is not installed: give --model", code="missing") from None
    except Exception as error:  # transformers' own, of all kinds
        raise SurgeryError(f"{file} is of no model ({first_line(error)}): give --model", code="unsupported") from None


def state_for(model: nn.Module, values: LazyState, label: str, called: str | None = None) -> LazyState:
    """Return the values under the names of `surgery.state(model)`.

    Args:
        label, called: what errors call the values, and the model.

    Raises:
        SurgeryError: if a tensor of the model is missing or has another shape, or one of the values is unknown; of code
            `values` if tensors differ that the model has tied.
    """
    places, tied, kind = {name: name for name in state(model)}, ties(model), called or type(model).__name__
    there: dict[str, list[str]] = {first: [first] if first in values else [] for first in places}
    for name, first in tied.items():
        if name != first and name in values:
            there[first].append(name)
    for first, names in there.items():
        places[first] = names[0] if names else first
        if other := next((name for name in names[1:] if not _are_equal(*map(values.pieces, (name, names[0])))), ""):
            raise SurgeryError(
                f"{label} has other numbers in {other!r} than in {names[0]!r}, and {kind} has one tensor for both, so "
                "one of them would be lost: untie them (tie_word_embeddings false in a folder's config.json, another "
                "--model), or leave one out",
                code="values",
            )
    entries = LazyState({name: values.pieces(place) for name, place in places.items() if place in values}, label)
    sizes, wrong = shapes_of(model), ""
    if missing := [name for name in places if name not in entries]:
        wrong = f"no {missing[0]!r}, which {kind} has, and {len(missing) - 1} more such tensors"
    elif extra := [name for name in values if name not in places.values() and name not in tied]:
        wrong = f"{extra[0]!r}, which {kind} does not have, and {len(extra) - 1} more such tensors"
    elif odd := [name for name in places if entries.pieces(name).shape != sizes[name]]:
        wrong = f"{odd[-1]!r} of shape {entries.pieces(odd[-1]).shape}, and {kind} of {sizes[odd[-1]]}"
    if wrong:
        way_out = "give the --model that it was saved from, with its arguments, such as num_classes=10 for 10 classes"
        raise SurgeryError(f"{label} has {wrong.removesuffix(', and 0 more such tensors')}: {way_out}", code="mismatch")
    return entries


def _are_equal(a: Pieces, b: Pieces) -> bool:
    """Return whether two tensors have the same shape, type and bytes."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return all(
        torch.equal(*(one.read(*span).contiguous().view(torch.uint8) for one in (a, b))) for span in spans(a.size)
    )


def check_runs(model: nn.Module, example: Any, shape: Sequence[int] | None) -> None:
    """Raise a SurgeryError with a way out for the command line unless a model runs."""
    hint = "; give the shape of one input as --input, without the batch"
    if shape is not None:
        shape_text, batch_text = (",".join(map(str, sizes)) for sizes in (shape, (2, *shape)))
        hint = f"; --input {shape_text} is one input without the batch, so that the model got {batch_text}"

    def run(net: nn.Module, inputs: Any) -> None:
        with in_mode(net, training=False):
            call(net, inputs)

    observe(model, example, run, hint)


def example_for(model: nn.Module, shape: Sequence[int] | None) -> Any:
    """Make an input of a model: zeros of the given shape, or tokens for a table.

    One for an encoder and a decoder also has tokens that the decoder reads.
    """
    if (inputs := make_inputs(model, shape)) is not None:
        return inputs
    first = next((module for _, module, _ in owners(model)), None)
    if isinstance(first, nn.Embedding) and len(shape or (8,)) == 1:
        return torch.zeros(2, *(shape or (8,)), dtype=torch.long)
    return example_input(model) if shape is None else torch.zeros(2, *shape)
