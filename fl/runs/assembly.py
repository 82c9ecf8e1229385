"""From settings to a federation and a method: data, split and models, by the seed."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from fl import data, partition
from fl.algorithms import ALGORITHMS
from fl.algorithms.algorithm import Algorithm
from fl.algorithms.extension import Order
from fl.base.errors import FLError, ask_memory
from fl.base.rng import Rng
from fl.distributed import current
from fl.engine import Precision
from fl.engine.augment import Augment
from fl.engine.work import activation_bytes
from fl.federation import Federation, LocalTraining
from fl.federation.scores import metrics_of
from fl.federation.transport import IN_PROCESS, Transport
from fl.models import custom_model
from fl.models.architectures import choose
from fl.models.create import check_shape, weight_bytes
from fl.models.fleet import ClientArchitecture, Fleet, make_fleet
from fl.models.init import Start, find, maker
from fl.models.search import maximum
from fl.models.sources import find_source
from fl.settings import Config
from fl.settings.extensions import EXTENSIONS, model_change
from surgery.errors import first_line
from zoo import Spec, ZooError

_log = logging.getLogger("fl")
_MASKED = 0.15  # of the tokens, as in HeteroFL's released code


def build(
    config: Config,
    dataset: data.Dataset | None = None,
    model: custom_model.Model | None = None,
    start: Start | None = None,
    transport: Transport = IN_PROCESS,
) -> tuple[Federation, Algorithm]:
    """Make the federation and the method of a run.

    The split, the initial weights, the sampling and the batches depend on the seed, not on the method.

    Args:
        dataset: data of your own, instead of the data that the settings name; or exactly these, if they are loaded
            already for another run (by `config.load()`, or `fl.data.load` without changing them since).
        model: your model, instead of the one in the settings: an `nn.Module` with the initial weights, or a function
            that makes one with weights that depend on the seed. Methods that start several models from different
            weights need a function. Or clients' own, of any architectures, for methods that send no
            weights (local, fedproto, fedmd): a list of such models, which clients have in turn, or a function of a
            client's number.
        start: the trained weights that --init names, if a run folder has kept them.
        transport: where clients are. If on other machines, they have their data already; `dataset` stands in for these
            and has a test set. By default the settings deal the data out to clients here.

    >>> fed, algorithm = build(Config.of(algorithm="fedavg"))
    >>> len(fed.clients), list(algorithm.init())
    (20, ['global'])
    """
    config = resolve_inputs(config, dataset, model)
    config.check()
    for name in () if transport.has_data else config.extensions:
        if EXTENSIONS[name].simulated:
            raise FLError(
                f"--{name} is for simulated clients, and these are on other machines: leave it out", code="unsupported"
            )
    device, rng = pick_device(config.execution.device), Rng(config.seed)
    dataset, local, splits, truth = _dealt(config, dataset, rng, device, transport)

    base = model_spec(config, dataset, model)
    extensions = [EXTENSIONS[name] for name in config.extensions]
    take_largest = frozenset[int]().union(
        *(extension.largest(config, rng) for extension in extensions if extension.largest)
    )
    spec, specs = _specs(config, base, dataset, splits, rng, take_largest, transport)
    if start is None and config.model.init:
        start = find(config.model.init, spec)
    if device.type == "cpu":
        _ask_for_round(config, specs or [spec])
    net, create, fleet = make_models(config, spec, start, len(splits), device)
    one_start = isinstance(getattr(spec, "source", None), nn.Module) and not model_change(config.extensions)
    by_path = model is None and custom_model.is_custom(config.model.name)
    source = custom_model.by_name(config.model.name) if by_path else model
    client_models, owned = custom_model.for_clients(source, len(splits))
    if client_models:
        fleet = _make_fleet(config, dataset, net, spec, client_models, owned, rng)
    if start is None:
        _warn_of_drawn(config, spec, net)
    if not isinstance(spec, custom_model.CustomSpec) and not dataset.text:
        check_shape(spec, net, dataset.shape)

    fed = Federation(
        net,
        dataset,
        splits,
        config.clients.cohort(),
        local,
        create=None if one_start else create,
        spec=spec,
        start=start,
        fleet=make_fleet(net, spec, specs) if specs else fleet,
        metrics=metrics_of(config.evaluation.metrics, dataset),
        truth=truth,
        transport=transport,
    )
    for name, extension in zip(config.extensions, extensions):
        fed = extension.federation(fed, config, rng) if extension.federation else fed
        if not isinstance(fed, Federation):
            raise FLError(f"the extension {name} made no federation: {fed!r}", code="run")
    if fed.training and not transport.has_data:
        raise FLError(
            "clients on other machines train by themselves: leave extensions that wrap training out", code="unsupported"
        )
    if device.type == "cpu":
        _ask_for_batch(fed, local)
    algorithm = make_algorithm(config, fed, rng)
    transport.begin(fed)
    return fed, algorithm


def _dealt(
    config: Config, dataset: data.Dataset | None, rng: Rng, device: torch.device, transport: Transport
) -> tuple[data.Dataset, LocalTraining, partition.Splits, torch.Tensor | None]:
    """Return the data on their device, how clients train on them, what each client has, and its true group, if it is
    known.
    """
    if dataset is None:
        dataset = config.load()
    elif transport.splits is None:
        dataset = config.data.prepare(
            replace(dataset, name=data.GIVEN) if config.data.dataset == data.GIVEN else dataset
        )
    if transport.splits is not None:
        if config.data.test_sites:
            raise FLError(
                "--test-sites is for simulated clients, and these are on other machines: leave it out",
                code="unsupported",
            )
        dataset, local = training(config, dataset)
        return dataset.to(device, config.execution.data_on), local, transport.splits, None
    parts, truth = config.data.deal(dataset, config.clients.number, rng.numpy("partition"))
    dataset, local = training(config, dataset)
    dataset, splits = config.data.split(dataset, parts, rng.numpy("hold-out"))
    return dataset.to(device, config.execution.data_on), local, splits, truth


def _ask_for_round(config: Config, specs: list[Spec]) -> None:
    """Raise FLError if a round does not fit into memory.

    A lower bound: the initial model, the server's, those that clients send, and the weights, gradients and momentum of
    a client that trains, all as small as the smallest.
    """
    needed = (config.clients.cohort() + 5) * min(map(weight_bytes, specs))
    purpose = f"a round of {config.clients.cohort():,} clients"
    ask_memory(needed, purpose, "use fewer --participants, or a smaller --width or --depth")


def _ask_for_batch(fed: Federation, local: LocalTraining) -> None:
    """Ask for what a client's step keeps of a batch, if half of it is freed early."""
    size = local.size_of_batches(fed.clients.train)
    least = min(activation_bytes(kind.model, fed.data) for kind in fed.fleet_or_uniform.architectures)
    ask_memory(size * least // 2, f"a batch of {size:,} samples", "use a smaller --batch-size, --width or --pad")


def _make_fleet(
    config: Config,
    dataset: data.Dataset,
    net: nn.Module,
    spec: Spec,
    client_models: list[custom_model.Model],
    owned: tuple[int, ...],
    rng: Rng,
) -> Fleet:
    """Return the clients' architectures with initial weights, the global model first."""
    ALGORITHMS[config.method.name].refuse({"own_architectures": "model= of several models"})
    change = model_change(config.extensions)
    if config.model.init or change:
        flag = f"--{change[0]}" if change else "--init"
        raise FLError(f"{flag} is for one model, and these are several: leave it out", code="unsupported")
    kinds = [ClientArchitecture(net, None, spec)]
    for source in client_models[1:]:
        its = model_spec(config, dataset, source)
        kinds.append(ClientArchitecture(maker(its, None)(rng.torch("weights")).to(dataset.device), None, its))
    return Fleet(tuple(kinds), owned)


def _warn_of_drawn(config: Config, spec: Spec, net: nn.Module) -> None:
    """Warn of weights that look trained but are initialised at random."""
    change, source = model_change(config.extensions), find_source(config.model.name)
    if drawn := getattr(net, "drawn", ()):
        _log.warning(
            "warning: --model %s begins with a random %s, which its folder lacks or has for other classes%s",
            config.model.name, ", ".join(drawn), f"; --{change[0]} freezes what it does not train" if change else "",
        )  # fmt: skip
    if change and (source.drawn if source else not isinstance(spec, custom_model.CustomSpec)):
        _log.warning(f"warning: --{change[0]} freezes random weights: give trained ones with --init")


def make_models(
    config: Config, spec: Spec, start: Start | None, clients: int, device: torch.device
) -> tuple[nn.Module, Callable[..., nn.Module], Fleet | None]:
    """Return the global model and a function that makes another.

    There are clients' models, too, if an extension makes several.

    All weights that are not in `start` depend on the seed alone.
    """
    create, change = maker(spec, start), model_change(config.extensions)
    if change is None:
        return create(Rng(config.seed).torch("weights")).to(device), create, None
    return change[1].make(create, config, clients, device)


def resolve_inputs(config: Config, dataset: data.Dataset | None, model: custom_model.Model | None) -> Config:
    """Complete the settings of a run by what was given, and by its held-out samples."""
    config = complete_settings(config, dataset, model)
    return config if dataset is not None and dataset.valid is not None else config.with_validation()


def check_config(config: object) -> None:
    """Raise FLError for what is not the settings of one run."""
    if not isinstance(config, Config):
        raise FLError(f"this takes an fl.Config, got {type(config).__name__}: fl.simulate_all trains an fl.Experiment")


def complete_settings(config: Config, dataset: data.Dataset | None, model: custom_model.Model | None) -> Config:
    """Complete the settings of a run by what was given, and not found by name.

    Data that were changed since they were loaded are given.
    """
    check_config(config)
    if not isinstance(dataset, data.Dataset | None):
        raise FLError(
            f"dataset is a {type(dataset).__name__}: give what fl.Dataset.from_arrays, from_torch or from_huggingface "
            "makes of it"
        )
    if dataset is not None and not config.data.names(dataset):
        config = config.replace(dataset=data.GIVEN).fit_to(dataset)
    return config if model is None else config.replace(model=custom_model.GIVEN)


def make_method(config: Config, fed: Federation) -> Algorithm:
    """Make the method of the settings, with nothing around it."""
    return ALGORITHMS[config.method.name](fed, config.method.options)


def make_algorithm(config: Config, fed: Federation, rng: Rng) -> Algorithm:
    """Make the method of the settings, within its extensions, for a federation."""
    algorithm = make_method(config, fed)
    wrapping = {name: EXTENSIONS[name] for name in config.extensions if EXTENSIONS[name].algorithm}
    if len(first := [f"--{name}" for name, extension in wrapping.items() if extension.order is Order.PROTECTING]) > 1:
        raise FLError(f"{' and '.join(first)} must each be the first to see what clients send: drop all but one")
    for name, extension in sorted(wrapping.items(), key=lambda item: item[1].order):
        within, algorithm = algorithm, extension.algorithm(algorithm, config, rng)
        if not isinstance(algorithm, Algorithm):
            raise FLError(f"the extension {name} made no algorithm of the method: {algorithm!r}", code="run")
        if algorithm.client is not within.client and not fed.transport.has_data:
            raise FLError(
                f"--{name} changes what clients do, and those on other machines know nothing of it: drop it",
                code="unsupported",
            )
    return algorithm


def training(config: Config, dataset: data.Dataset) -> tuple[data.Dataset, LocalTraining]:
    """Return the data as clients train on them, and how these train."""
    local, execution, name = config.local, config.execution, config.model.name
    augment = Augment(local.crop, local.flip)
    if execution.channels_last and not dataset.images:
        raise FLError(
            "--channels-last is a layout of images, and the samples are none: leave it out", code="unsupported"
        )
    if source := find_source(name):
        dataset = source.fit_to(dataset, config)
    if name == "transformer_masked":  # it has to name the tokens, also the hidden ones
        if not dataset.text:
            raise FLError(
                "--model transformer_masked is made for text, and the data set is none: choose another model",
                code="unsupported",
            )
        if dataset.on_host:
            raise FLError(
                "--model transformer_masked makes a copy of all tokens, which are kept on the host: use another",
                code="unsupported",
            )
        if dataset.unscored:
            raise FLError(
                "--model transformer_masked names hidden tokens anywhere, and of these data some count alone",
                code="unsupported",
            )
        dataset = replace(dataset, y=dataset.x.long(), test_y=dataset.test_x.long())
        augment = augment._replace(mask=_MASKED, token=dataset.classes)
    return dataset, LocalTraining(
        epochs=local.epochs,
        batch_size=local.batch_size,
        last_batch=local.last_batch,
        optimizer=local.make_optimizer(),
        schedule=local.schedule(config.rounds),
        loss=local.make_loss(dataset),
        augment=augment,
        masked=local.masked_loss,
        backend=execution.backend,
        max_parallel_clients=execution.max_parallel_clients,
        precision=Precision(local.precision, execution.channels_last, execution.deterministic),
        rounds=config.rounds,
    )


def _specs(
    config: Config,
    base: Spec,
    dataset: data.Dataset,
    clients: partition.Splits,
    rng: Rng,
    take_largest: frozenset[int],
    transport: Transport,
) -> tuple[Spec, list[Spec]]:
    """Return the specs of the global model and of each client; none if all are alike.

    The global model has the maximum of all clients' widths and depths.
    """
    if ALGORITHMS[config.method.name].clients != "heterogeneous" or model_change(config.extensions):
        return base, []
    chosen = None if transport.has_data else transport.specs(config.model.architectures.announce(base))
    if not (transport.has_data or chosen) and config.model.architectures.choose == "zico":
        raise FLError(
            "--architectures.choose zico looks at clients' data, which lie on other machines here: give each node a "
            "width, a depth or a budget, or --architectures.choose cycle, random, budget or given",
            code="unsupported",
        )
    chosen = chosen or choose(
        config.model.architectures, base, dataset, clients, config.local.batch_size, rng, take_largest
    )
    if hasattr(options := config.method.options, "adapt"):
        chosen = list(map(options.adapt, chosen))
    return maximum(chosen), chosen


def model_spec(config: Config, dataset: data.Dataset, model: custom_model.Model | None = None) -> Spec:
    """Describe the model of the settings for the samples and classes of a data set.

    Args:
        model: a model of your own, if the settings do not name it.
    """
    if custom_model.is_custom(config.model.name):
        source = custom_model.by_name(config.model.name) if model is None else model
        try:
            return custom_model.describe(
                config.model.name, source, dataset, config.model.width, config.model.depth or None
            )
        except ZooError as error:
            raise FLError(str(error), code=error.code) from None
    if dataset.dense:
        raise FLError(
            f"--model {config.model.name} gives a class for an image, and the data have one for each pixel: give a "
            "model of your own, such as a U-Net, that gives [N, classes, H, W]",
            code="unsupported",
        )
    if dataset.text:
        return replace(config.model.spec(config.data, dataset.classes, text=True), tokens=dataset.x.shape[1])
    if not dataset.images:
        check_shape(config.model.spec(config.data, dataset.classes, text=False), nn.Identity(), dataset.shape)
    return config.model.spec(config.data, dataset.classes, dataset.x.shape[1], dataset.x.shape[-1], text=False)


def pick_device(name: str) -> torch.device:
    """Find a torch device by name; `auto` is the first GPU, or the CPU.

    Each rank has a GPU of its own.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and current().size > 1:
        name = f"cuda:{current().local}"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError("there are cpu, cuda (cuda:0, cuda:1, ...) and mps")
        if device.type == "mps" and not torch.backends.mps.is_available():
            raise RuntimeError("torch finds no GPU of Apple's here")
        torch.ones(1, device=device).add(1).item()  # it is there, has memory left, and this torch computes on it
    except (RuntimeError, AssertionError) as error:
        raise FLError(
            f"device {name!r} cannot be used: {first_line(error)}; choose another, or --device cpu", code="unsupported"
        ) from None
    return device
