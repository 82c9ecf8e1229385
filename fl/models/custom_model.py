"""Models that a user wrote: an `nn.Module`, or a function or import path of one.

A spec of such a model is a `zoo.Spec` of a class of its own, made by `describe`, which builds the user's model. So all
that takes a spec takes it: narrow and shallow models come from `surgery`, as for models of timm and torchvision.
"""

import copy
import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

import zoo
from fl.base.errors import FLError
from fl.base.plugins import describe_failure, find, is_path, kind, list_installed
from fl.data import Dataset
from fl.data.inputs import Inputs, map_inputs, write_shape
from fl.models.library import seeded
from fl.models.padding import keep_mask
from fl.models.sources import ModelSource, find_source
from surgery.errors import first_line
from surgery.plan import has_structure, structure
from surgery.transfer import double
from zoo.architecture import Architecture

GIVEN = "given"
"""What `--model` is in the settings of a run whose model was given from Python."""

LIBRARIES = ("timm", "torchvision")
Model: TypeAlias = nn.Module | Callable[..., nn.Module] | Sequence[nn.Module | Callable[[], nn.Module]]
"""A module, whose weights are the initial ones, or a function that makes one with weights of its own. Or models of
several architectures: a list of them, which clients have in turn, or a function of a client's number."""


class CustomSpec(zoo.Spec):
    """The spec of a user's model, made by `describe`.

    Before data and model are known, nothing can be built.

    Attributes:
        source: the model. sample: what it gets of one sample, on the meta device. targets: the shape of its labels.
        dense: whether these are masks, so that it gives [N, classes, *targets].
    """

    source: ClassVar[Model | None] = None
    sample: ClassVar[Inputs] = torch.empty(0, device="meta")
    targets: ClassVar[tuple[int, ...]] = ()
    dense: ClassVar[bool] = False

    @property
    def architecture(self) -> Architecture:
        """The fields of a spec: a width of at most 1, a depth, the number of classes."""
        return Architecture(None, {"depths": None, "num_classes": None}, "your own")

    def build(self, generator: torch.Generator | None = None, device: torch.device | str = "cpu") -> nn.Module:
        """Copy the module, or call the function; `generator` seeds torch's for that."""
        if self.width != (1.0,) or self.depth is not None:
            raise FLError(
                f"{self.name} is built at full size only: fl.models.create makes it narrow and shallow",
                code="unsupported",
            )
        model = _fit(_build(self.name, self.source, generator), self.sample)
        return (classes_last(model, len(self.targets)) if self.dense else model).to(device)

    def full(self) -> nn.Module:
        """Build the user's model as it was given, neither narrow nor shallow."""
        return replace(self, width=1.0, depth=None).build(torch.Generator().manual_seed(0))

    def example(self, batch: int = 1, size: int | None = None, device: torch.device | str = "cpu") -> Any:
        """Make samples of zeros, of the data's size."""
        del size
        return map_inputs(lambda tensor: tensor.new_zeros(batch, *tensor.shape, device=device), self.sample)

    def classifier(self) -> frozenset[str]:
        """Find the tensors of the layer that gives the full model's logits; else none."""
        model, outputs = classes_as_given(self.full()), {}
        leaves = {name: module for name, module in model.named_modules() if not [*module.children()]}
        hooks = [
            module.register_forward_hook(lambda _, __, output, name=name: outputs.update({name: output}))
            for name, module in leaves.items()
        ]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits = model.train()(self.example(2))
        for hook in hooks:
            hook.remove()
        for name, output in outputs.items():
            if output is logits:
                return frozenset(f"{name}.{key}" if name else key for key in leaves[name].state_dict())
        return frozenset()


def is_custom(name: str) -> bool:
    """Return whether a model of this name is a user's.

    >>> is_custom("given"), is_custom("my_module:MyNet"), is_custom("timm:resnet18"), is_custom("cnn")
    (True, True, False, False)
    """
    module = name.partition(":")[0]
    if module == GIVEN or find_source(name):
        return True
    if is_path(name, LIBRARIES):
        if not difflib.get_close_matches(module, LIBRARIES, n=1, cutoff=0.75):
            return True
        try:
            return find_spec(module) is not None  # a misspelt timm is no module
        except (ImportError, ValueError):
            return False
    return name in list_installed("models") and name not in zoo.names()


def by_name(name: str) -> Model:
    """Import the model of an import path or an entry point.

    Raises:
        FLError: for one that is not there, or is neither a module nor a function; and for one that was given from
            Python.
    """
    if name.partition(":")[0] == GIVEN:
        raise FLError(
            "these are the settings of a run whose model was given from Python: give it again, as in "
            "fl.simulate(config, folder, resume=True, model=...), fl.load_model(folder, model=...) or "
            "fl.export_model(folder, file, model=...)"
        )
    if source := find_source(name):
        source.check()
        return source
    return check_model(find("models", name), f"--model {name}")


def check_model(model: Any, flag: str = "model=") -> Model:
    """Return a model, or raise FLError unless it is a module or a function.

    Of several models the first is checked.
    """
    first_model = first(model)
    if isinstance(first_model, nn.Module) or callable(first_model):
        return model
    raise FLError(f"{flag} is {kind(first_model)}: give an nn.Module, or a function that makes one")


def first(model: Model) -> Model:
    """Return the model of client 0: a module, or a function without arguments."""
    if isinstance(model, Sequence) and not isinstance(model, str | nn.Module):
        if not model:
            raise FLError("model=[] is an empty list: give a model, or several")
        return model[0]
    return partial(model, 0) if _is_numbered(model) else model


def for_clients(model: Model | None, clients: int) -> tuple[list[Model], tuple[int, ...]]:
    """Return the distinct models, and which of them each client has.

    There are none where all clients have the same. Those that a function makes are the same if their modules and these
    modules' settings are.

    >>> few = for_clients([nn.Linear(2, 2), nn.Linear(3, 2)], clients=3)
    >>> few[1], for_clients(lambda k: nn.Linear(2 + k % 2, 2), clients=3)[1], for_clients(nn.Linear(2, 2), clients=3)
    ((0, 1, 0), (0, 1, 0), ([], ()))
    """
    if model is None or first(model) is model:
        return [], ()
    distinct: dict[Any, Model] = {}
    keys: list[Any] = []
    if isinstance(model, Sequence):
        if len(model) > clients:
            raise FLError(
                f"{len(model)} models for {clients} clients: give one each, or fewer, which they have in turn"
            )
        keys = [id(model[k % len(model)]) for k in range(clients)]
        distinct = {id(item): item for item in model}
    else:
        for k in range(clients):
            built = _build(GIVEN, partial(model, k), torch.Generator().manual_seed(0))
            keys.append((type(built).__qualname__, str(structure(built))))
            distinct.setdefault(keys[-1], partial(model, k))
    return (list(distinct.values()), tuple(map(list(distinct).index, keys))) if len(distinct) > 1 else ([], ())


def _is_numbered(model: Any) -> bool:
    """Return whether it is a function of one argument: a client's number."""
    if isinstance(model, nn.Module | type) or not callable(model):
        return False
    try:
        needed = [p for p in inspect.signature(model).parameters.values() if p.default is p.empty]
    except (TypeError, ValueError):
        return False
    return len(needed) == 1 and needed[0].kind in (needed[0].POSITIONAL_ONLY, needed[0].POSITIONAL_OR_KEYWORD)


def name_of(name: str) -> str:
    """Name a model in messages: by its flag, or by the argument that it was given as.

    >>> name_of("resnet20"), name_of("my_module:MyNet"), name_of("given:MyNet")
    ('--model resnet20', '--model my_module:MyNet', 'model=MyNet')
    """
    prefix, _, kind = name.partition(":")
    return f"model={kind}" if prefix == GIVEN else f"--model {name}"


def describe(name: str, model: Model, data: Dataset, width: Any = 1.0, depth: Any = None) -> CustomSpec:
    """Make the spec of a user's model for such data.

    Of samples with several inputs the model gets them by keyword.

    Args:
        name: an import path or an entry point; "given" becomes given:CLASS.

    Raises:
        FLError: for a model that cannot be made, does not take such samples, or gives no logits of the data's classes;
            ZooError for a width or depth that it cannot have.

    >>> from fl.data import load
    >>> describe("given", lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), load("digits")).name
    'given:Sequential'
    """
    if isinstance(model, ModelSource):
        model.check_takes(data)
    model = _for_data(first(model), data.tokens, data.outputs)
    maker = getattr(check_model(model), "__name__", type(model).__name__)
    net = _build(f"{GIVEN}:{maker}" if name == GIVEN else name, model, torch.Generator().manual_seed(0))
    name = f"{GIVEN}:{type(net).__name__}" if name == GIVEN else name
    example = data.example(2, _dtype(net))
    two = map_inputs(lambda some: torch.cat([some, some])[:2].cpu(), example)
    _check_takes(name, classes_as_given(_fit(net, example)), data, two)
    spec = _spec_class(model, map_inputs(lambda some: some[0].to("meta"), example), data.outputs[:-1], data.dense)
    return spec(name, num_classes=data.classes, width=width, depth=depth)


def restore(values: dict[str, Any], known: dict[str, Any], where: str, model: Model | None) -> CustomSpec:
    """Make the spec of a run folder's model again.

    Args:
        values: its fields, as a checkpoint has them. known: what `identity` and `sample` said of it.
        where: the folder, for messages.
        model: the model; None: it is found by its name.

    Raises:
        FLError: if there is no model, or another one.
    """
    name = values["name"]
    source = _for_data(
        first(by_name(name) if model is None else check_model(model)),
        known["tokens"],
        (*known["targets"], values["num_classes"]),
    )
    net = _build(name, source, torch.Generator().manual_seed(0))
    check_same(net, known, where)

    def of_one(shape: Sequence[int], tokens: bool | str) -> Tensor:
        dtype = torch.bool if tokens == "truth values" else torch.int64 if tokens else _dtype(net)
        return torch.empty(*shape, dtype=dtype, device="meta")

    sample, dense = map_inputs(of_one, known["sample"], known["tokens"]), known.get("dense", False)
    return _spec_class(source, sample, known["targets"], dense).from_dict(values)


def identity(spec: CustomSpec) -> dict[str, Any]:
    """Describe a model in JSON, by which a run folder refuses another model."""
    full = spec.full()
    return {
        "class": type(full).__qualname__,
        "structure": structure(full),
        "sample": map_inputs(lambda tensor: list(tensor.shape), spec.sample),
        "tokens": map_inputs(
            lambda tensor: "truth values" if tensor.dtype == torch.bool else tensor.dtype == torch.int64, spec.sample
        ),
        "targets": list(spec.targets),
        **({"dense": True} if spec.dense else {}),
    }


def check_same(model: nn.Module, known: dict[str, Any], where: str) -> None:
    """Raise FLError unless this is the model that `identity` described."""
    if type(model).__qualname__ != known["class"]:
        raise FLError(
            f"{where} holds a run of the model {known['class']}, and this is {type(model).__qualname__}", code="folder"
        )
    if not has_structure(model, known["structure"]):
        raise FLError(
            f"{where} holds a run of another {known['class']}: its modules or their settings (sizes, strides, ...) "
            "differ from this one's",
            code="folder",
        )


def _for_data(model: Model, tokens: bool, outputs: Sequence[int]) -> Model:
    return model.maker(tokens, outputs) if isinstance(model, ModelSource) else model


def _spec_class(source: Model, sample: Inputs, targets: Sequence[int], dense: bool) -> type[CustomSpec]:
    """Make the class of a model's specs, so that specs of two models are never equal."""
    member = source if isinstance(source, nn.Module) else staticmethod(source)
    fields = {"source": member, "sample": sample, "targets": tuple(targets), "dense": dense}
    return type("CustomSpec", (CustomSpec,), fields)


def by_keyword(model: nn.Module) -> nn.Module:
    """Let a model take a dict as its one argument, as keywords of `forward`.

    So methods hand on the inputs of a batch as one value, whether they are a tensor or several. Returns the model.

    >>> model = by_keyword(nn.Bilinear(2, 3, 1))
    >>> model({"input2": torch.ones(4, 3), "input1": torch.ones(4, 2)}).shape
    torch.Size([4, 1])
    """
    model.register_forward_pre_hook(_spread, with_kwargs=True)
    return model


def _spread(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), args[0]) if args and isinstance(args[0], dict) else (args, kwargs)


class _ClassesLast(NamedTuple):
    """A forward hook that moves the axis of classes, which stands before as many axes as a mask has, to the end."""

    axes: int

    def __call__(self, model: nn.Module, inputs: Any, output: Any) -> Any:
        return output.movedim(-1 - self.axes, -1) if isinstance(output, Tensor) and output.ndim > self.axes else output


def classes_last(model: nn.Module, axes: int = 2) -> nn.Module:
    """Let a model of masks give [N, H, W, classes], not [N, classes, H, W].

    So methods see a pixel as they see a token of text; `classes_as_given` undoes it. Returns the model.

    Args:
        axes: how many a mask has.

    >>> model = classes_last(classes_last(nn.Conv2d(1, 5, 1)))
    >>> model(torch.ones(2, 1, 8, 6)).shape, classes_as_given(model)(torch.ones(2, 1, 8, 6)).shape
    (torch.Size([2, 8, 6, 5]), torch.Size([2, 5, 8, 6]))
    """
    if not any(isinstance(hook, _ClassesLast) for hook in model._forward_hooks.values()):
        model.register_forward_hook(_ClassesLast(axes))
    return model


def classes_as_given(model: nn.Module) -> nn.Module:
    """Undo `classes_last`. Returns the model."""
    for key in [key for key, hook in model._forward_hooks.items() if isinstance(hook, _ClassesLast)]:
        del model._forward_hooks[key]
    return model


def as_given(model: nn.Module) -> nn.Module:
    """Let a model give its class's outputs again: undo `classes_last` and the like.

    Returns the model, which needs nothing of fl then, such as to be unpickled.
    """
    for key in [key for key, hook in model._forward_hooks.items() if hook is _logits]:
        del model._forward_hooks[key]
    return classes_as_given(model)


def _fit(model: nn.Module, sample: Inputs) -> nn.Module:
    """Let a model take the samples, and give logits instead of an output object."""
    model = by_keyword(model) if isinstance(sample, dict) else model
    if isinstance(model, torch.jit.ScriptModule):
        return model
    model.register_forward_hook(_logits)
    if isinstance(sample, dict) and "attention_mask" in sample and type(model).__module__.startswith("transformers."):
        keep_mask(model)
    return model


def _logits(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Return the logits of an output object of transformers; other outputs as is."""
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the type of the first parameter, in which a model gets its samples."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def _build(name: str, source: Model | None, generator: torch.Generator | None) -> nn.Module:
    """Make a new model, on the CPU or where its maker puts it."""
    if source is None:
        raise FLError(f"{name_of(name)} cannot be built before the data are known")
    with seeded(generator):
        try:
            model = copy.deepcopy(source) if isinstance(source, nn.Module) else source()
        except FLError:
            raise
        except (Exception, SystemExit) as error:
            problem = " cannot be copied" if isinstance(source, nn.Module) else ", called without arguments, fails"
            raise FLError(f"{name_of(name)}{problem}: {describe_failure(error)}", code="run") from None
    if not isinstance(model, nn.Module):
        raise FLError(f"{name_of(name)} returns {kind(model)}: let it return an nn.Module", code="run")
    if any(nn.parameter.is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        raise FLError(
            f"{name_of(name)} has lazy modules, whose sizes are unknown: call it on a batch first", code="unsupported"
        )
    if odd := [place for place, p in model.named_parameters() if p.is_complex()]:
        raise FLError(
            f"{name_of(name)} has complex parameters ({odd[0]}): hold their torch.view_as_real, which is trained",
            code="unsupported",
        )
    if not any(p.is_floating_point() for p in model.parameters()):
        raise FLError(f"{name_of(name)}, a {type(model).__name__}, has no parameters to train", code="unsupported")
    return model


def _whats(data: Dataset) -> str:
    noun = {"regression": "numbers to predict", "multilabel": "labels"}.get(data.task, "classes")
    noun += " for each pixel" * data.dense
    return f"{data.classes} {noun}"


def _check_takes(name: str, model: nn.Module, data: Dataset, inputs: Inputs) -> None:
    """Raise FLError unless both modes give logits for these inputs of two samples."""
    shape = write_shape(data.shape)
    for training, mode in ((True, "in training"), (False, "in evaluation mode")):
        try:
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                output = copy.deepcopy(model).cpu().train(training)(inputs)
        except Exception as error:  # it is the user's own code
            values = f"{'tokens' if data.tokens else 'numbers'}{'' if training else ' ' + mode}"
            table = "; is this a table? give floats, x.astype('float32')" if data.tokens and not data.text else ""
            source = find_source(name)
            hint = source.hint(data) if source else table
            raise FLError(
                f"{name_of(name)} does not take samples of {shape} {values}: {first_line(error)}{hint}", code="run"
            ) from None
        outputs = (data.classes, *data.outputs[:-1]) if data.dense else data.outputs
        exits, wanted, whole = getattr(model, "exits", False), [2, *outputs], ""
        if exits and training and isinstance(output, Tensor) and output.ndim > 1:
            wanted.insert(1, output.shape[1])  # there may be any number of them
        elif exits and not training:
            whole = " (all exits are for training; here it is their mean, for example)"
        if not isinstance(output, Tensor) or list(output.shape) != wanted:
            actual = list(output.shape) if isinstance(output, Tensor) else kind(output)
            raise FLError(
                f"{name_of(name)} gives {actual} for two samples {mode}, and the data have {_whats(data)}: it has to "
                f"give {wanted}{whole}",
                code="run",
            )
        if data.task == "regression":
            continue
        sums = double(output).sum(-len(outputs) if data.dense else -1)
        if (output >= 0).all() and torch.isclose(sums, torch.ones_like(sums), atol=1e-3).all():
            raise FLError(
                f"{name_of(name)} gives probabilities {mode} (they sum to 1), and the loss takes logits: "
                "leave the Softmax at its end out",
                code="run",
            )
        if type(output.grad_fn).__name__.startswith("Sigmoid"):
            raise FLError(
                f"{name_of(name)} ends in a Sigmoid {mode}, and the loss takes logits: leave the Sigmoid out",
                code="run",
            )
