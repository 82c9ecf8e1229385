"""From settings to a federation and a method: data, split, architectures, attack and model, drawn from the seed."""

from dataclasses import replace
from functools import partial

import torch

from fl import data, models, partition
from fl.algorithms import ALGORITHMS, is_mixed
from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.config import Config
from fl.engine import Precision
from fl.engine.augment import Augment
from fl.federation import Federation, LocalTraining
from fl.federation.attack import draw_malicious, make_attack
from fl.federation.presence import make_presence
from fl.models.architectures import choose
from fl.models.fleet import make_fleet
from fl.models.search import maximum
from fl.runs.memory import check_batch, check_models
from zoo import Spec

_MASKED = 0.15  # of the tokens, as in HeteroFL's released code


def build(config: Config, dataset: data.Dataset | None = None) -> tuple[Federation, Algorithm]:
    """The federation and the method of a config with one algorithm and one seed.

    The split, the initial weights, the sampling and the batches depend on the seed, not on the method.

    Args:
        dataset: the settings' data set, if it is loaded already for another run.

    >>> fed, algorithm = build(Config(algorithm=("fedavg",)))
    >>> len(fed.clients), list(algorithm.init())
    (20, ['global'])
    """
    config.check()
    if len(config.runs()) > 1:
        raise FLError("these are the settings of several runs: take one of config.runs()")
    (name,), (seed,) = config.algorithm, config.seeds
    device = pick_device(config.device)
    dataset = dataset or config.load()
    rng = Rng(seed)
    parts, truth = config.deal(dataset, rng.numpy("partition"))
    augment = Augment(config.crop, config.flip)
    if config.model == "transformer_masked":  # it has to name the tokens, some of which are hidden
        dataset = replace(dataset, y=dataset.x.long(), test_y=dataset.test_x.long())
        augment = augment._replace(mask=_MASKED, token=dataset.classes)
    splits = partition.hold_out(parts, config.local_valid, config.local_test, rng.numpy("hold-out"))
    if config.pool:
        dataset = dataset.tested_on(splits.test.samples)
    dataset = dataset.to(device)
    malicious = draw_malicious(config.attack, config.clients, rng)
    attack = make_attack(config.attack, malicious, dataset, splits, rng)
    presence = make_presence(config.clients, config.cohort(), config.joining, config.leaving, config.rounds, rng)
    spec, specs = _specs(config, dataset, splits, rng, malicious)
    if device.type == "cpu":
        check_models(specs or [spec], config.cohort())
    model = models.create(rng.torch("weights"), spec).to(device)
    local = LocalTraining(
        epochs=config.local_epochs,
        batch_size=config.batch_size,
        optimizer=config.local_optimizer(),
        schedule=config.schedule(),
        augment=augment,
        masked=config.masked_loss,
        backend=config.backend,
        chunk=config.chunk,
        precision=Precision(config.precision, config.channels_last, config.deterministic),
    )
    fed = Federation(
        model,
        dataset,
        splits,
        config.cohort(),
        local,
        create=partial(models.create, spec=spec),
        spec=spec,
        fleet=make_fleet(model, spec, specs) if specs else None,
        attack=attack,
        defence=config.defence,
        presence=presence,
        truth=truth,
    )
    check_batch(fed)
    method = ALGORITHMS[name]
    if isinstance(method, Method):
        return fed, method(fed, getattr(config, name, None))
    return fed, method(fed, config)  # a plain function, of all settings


def _specs(
    config: Config, dataset: data.Dataset, clients: partition.Splits, rng: Rng, malicious: frozenset[int]
) -> tuple[Spec, list[Spec]]:
    """The global model, with the maximum of all clients' widths and depths, and each client's own model; no own models
    if all clients have the global one.
    """
    (name,) = config.algorithm
    base = model_spec(config, dataset)
    if not is_mixed(name):
        return base, []
    chosen = choose(config.architectures, base, dataset, clients, config.batch_size, rng, malicious)
    if hasattr(options := getattr(config, name, None), "adapt"):
        chosen = list(map(options.adapt, chosen))
    return maximum(chosen), chosen


def model_spec(config: Config, dataset: data.Dataset) -> Spec:
    """The model of the settings for the images and classes, or the vocabulary, of a data set."""
    if dataset.text:
        return replace(config.spec(dataset.classes), tokens=dataset.x.shape[1])
    return config.spec(dataset.classes, dataset.x.shape[1], dataset.x.shape[-1])


def pick_device(name: str) -> torch.device:
    """A torch device by name; `auto` is the first GPU, or the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("there are cpu and cuda (cuda:0, cuda:1, ...)")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise FLError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device
