"""The settings of a run: nested by topic, checked, written as YAML and read again."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, Any

import torch
import yaml

from fl.algorithms import ALGORITHMS, OPTIONS, SOURCES
from fl.algorithms.method import Method
from fl.base.errors import FLError
from fl.base.settings import (
    Alternative,
    Alternatives,
    AtLeast1,
    Default,
    Named,
    Natural,
    Rare,
    Setting,
    as_plain,
    as_read,
    check_value,
    choice,
    flag_of,
    lower_defaults,
    marks,
    number,
    settings_of,
)
from fl.data import GIVEN, Dataset
from fl.engine.optimizers import SCHEDULES
from fl.models.architectures import ArchitectureOptions
from fl.partition import KINDS
from fl.settings import stored
from fl.settings.data import DataSettings
from fl.settings.evaluation import EvaluationSettings
from fl.settings.execution import ExecutionSettings
from fl.settings.extensions import EXTENSIONS, model_change
from fl.settings.model import ModelSettings
from fl.settings.places import METHOD, OWN, PLACES, SOURCE, TOPICS, method_named, partition_named
from fl.settings.topic import Topic
from fl.settings.training import ClientSettings, LocalSettings

_HELD_OUT = 0.1
"""Of each client's samples, for a method that validates, where the settings hold none out."""
_SAME_RUN = {"seed", "algorithm"} | {name for name, place in PLACES.items() if place[0] in ("evaluation", "execution")}
"""Settings in which runs may differ that compare the same thing."""
RESUMABLE = frozenset(
    {"rounds", "patience", "eval_every", "eval_client_models_every", "checkpoint_every", "log", "device", "data_on"}
    | {"max_parallel_clients", "data_root", "download"}
)
"""Settings that a run may change when it resumes."""
_log = logging.getLogger("fl")


@dataclass(frozen=True)
class Config:
    """Settings of one run. The defaults are FedMR on handwritten digits.

    It is one run, of one method with one seed. `Config.of` takes settings by the names that they have as flags.

    Attributes:
        extensions: the options of extensions that are asked for, by name.

    >>> config = Config.of(dataset="digits", alpha=0.1, algorithm="fedprox", lr=0.05)
    >>> config.local.lr, config.data.partition.options.alpha, config.method.options
    (0.05, 0.1, FedProxOptions(mu=0.01))
    """

    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    method: Annotated[Alternative, Named("algorithm"), Alternatives(lambda: OPTIONS, prefixed=True)] = Alternative(
        METHOD, ALGORITHMS[METHOD].options
    )
    clients: ClientSettings = ClientSettings()
    local: LocalSettings = LocalSettings()
    rounds: AtLeast1 = 40
    """number of communication rounds"""
    patience: Annotated[Natural, Rare()] = 0
    """stop after this number of evaluations without a better one: validation loss if clients validate, else test
    accuracy; 0 is never"""
    seed: Annotated[int, number(int, "INT", least=0, below=2**32)] = 0
    """determines the split, the initial weights, the sampling and the batches"""
    evaluation: EvaluationSettings = EvaluationSettings()
    execution: ExecutionSettings = ExecutionSettings()
    extensions: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in OWN:
            object.__setattr__(self, name, as_plain(getattr(self, name)))
        extensions = {name: as_plain(options) for name, options in self.extensions.items()}
        extensions = {
            name: group
            for name, group in extensions.items()
            if name not in EXTENSIONS or group != EXTENSIONS[name].options
        }
        object.__setattr__(self, "extensions", extensions)
        with suppress(TypeError, ValueError, AttributeError, ZeroDivisionError):  # of wrong types, see `check`
            object.__setattr__(self, "clients", self.clients.following())
            object.__setattr__(self, "data", self.data.following(self.clients.number))
            options = self.method.options
            if options is not None:
                options = as_plain(lower_defaults(options, self.clients.number))
                object.__setattr__(self, "method", replace(self.method, options=options))

    @classmethod
    def of(cls, **settings: Any) -> "Config":
        """Make the settings of a run from names of flags, with _ for -, and whole groups.

        Args:
            settings: such as dataset="cifar10", alpha=0.1, algorithm="fedprox", fedprox={"mu": 1.0},
                privacy=fl.Privacy(clip=0.5), or some settings of a topic: local={"epochs": 1}. `check` looks at values.

        Raises:
            FLError: for a setting that there is not, and for an option of another partition or method.
        """
        return cls().replace(**settings)

    def replace(self, /, **settings: Any) -> "Config":
        """Return these settings with some replaced, named as `of` has them.

        A mapping replaces some settings of a group: `config.replace(privacy={"clip": 0.5})`. The options of a partition
        and of a method are the defaults where another one is chosen.
        """
        for topic in [name for name in TOPICS if isinstance(settings.get(name), Mapping)]:
            settings |= {stored.name_outside(topic, name): value for name, value in settings.pop(topic).items()}
        whole = [name for name in TOPICS if isinstance(settings.get(name), Topic)]
        if wrong := [name for name in whole if not isinstance(settings[name], TOPICS[name])]:
            raise FLError(f"{wrong[0]} takes {TOPICS[wrong[0]].__name__}, got {short(settings[wrong[0]])}")
        top_level = {name: settings.pop(name) for name in [*settings] if name in (*OWN, *whole)}
        extensions = {name: settings.pop(name) for name in [*settings] if name in EXTENSIONS}
        now = {name: self.extensions.get(name, EXTENSIONS[name].options) for name in extensions}
        extensions = {name: options_of(name, value, now[name]) for name, value in extensions.items()}
        method, partition = self._method(settings), _partition(top_level.get("data", self.data).partition, settings)
        inside: dict[str, dict[str, Any]] = {"data": {"partition": partition}}
        for name, value in settings.items():
            if name not in PLACES:
                raise FLError(_stray(name, partition.name, method.name), code="name")
            topic, place = PLACES[name]
            if isinstance(value, Mapping):
                value = options_of(name, value, getattr(top_level.get(topic, getattr(self, topic)), place))
            inside.setdefault(topic, {})[place] = value
        topics = {name: replace(top_level.pop(name, getattr(self, name)), **values) for name, values in inside.items()}
        return replace(self, **top_level, **topics, method=method, extensions={**self.extensions, **extensions})

    def _method(self, settings: dict[str, Any]) -> Alternative:
        """Take the method and its options out of settings by name."""
        method = _choose(self.method, method_named(settings.pop("algorithm", self.method)), OPTIONS)
        if method.name not in settings or method.options is None:
            return method
        return replace(method, options=options_of(method.name, settings.pop(method.name), method.options))

    def settings(self) -> list[Setting]:
        """List all settings of the run and all extensions, with why nothing reads each.

        >>> flags = {one.flag for one in Config.of(algorithm="fedavg").settings() if not one.unread}
        >>> "lr" in flags, "fedmr.segment-fraction" in flags, "betas" in flags
        (True, False, False)
        """
        settings: list[Setting] = []
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "extensions":
                neutral = {name: extension.options for name, extension in EXTENSIONS.items()}
                for name, options in {**neutral, **value}.items():
                    settings += settings_of(options, name, (name,))
            elif item.name in TOPICS:
                inside = settings_of(value, "", (item.name,))
                settings += [setting._replace(unread=setting.unread or self._unread(setting)) for setting in inside]
            elif isinstance(value, Alternative):
                settings.append(Setting(item, "", value.name, (item.name,), ""))
                if value.options is not None:
                    settings += settings_of(value.options, value.name, (item.name,))
            else:
                settings.append(Setting(item, "", value, (item.name,), ""))
        return settings

    def __repr__(self) -> str:
        """Write what `Config.of` takes to make these settings, without defaults.

        >>> Config.of(algorithm="fedprox", lr=0.05, fedprox={"mu": 1.0})
        Config.of(algorithm='fedprox', fedprox={'mu': 1.0}, lr=0.05)
        """
        try:
            name, changed = self.method.name, self.list_changed()
        except (TypeError, AttributeError, FLError):  # of values that `check` refuses
            return object.__repr__(self)
        arguments: dict[str, Any] = {} if name == METHOD else {"algorithm": SOURCES.get(name, name)}
        for setting in changed:
            if setting.name == "algorithm":
                continue
            group, _, name = setting.name.rpartition(".")
            place = arguments.setdefault(group, {}) if group else arguments
            place[name] = as_plain(setting.value if not isinstance(setting.value, Default) else int(setting.value))
        return f"Config.of({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"

    def _unread(self, setting: Setting) -> str:
        """Say why the method does not read a setting.

        One that is not registered here may read --architectures.
        """
        name = self.method.name
        if setting.group == "architectures" and name in ALGORITHMS and not _different(name):
            return (
                f"--{setting.flag} is for methods such as heterofl, whose clients differ in architecture: {name} gives "
                "all clients one model; leave it out, or make your own method a Method(..., clients='heterogeneous')"
            )
        return ""

    def list_changed(self, start: "Config | None" = None) -> list[Setting]:
        """List the settings whose values differ from another run's, or from the defaults of the method."""
        start = start or Config().replace(algorithm=self.method.name)
        usual = {setting.flag: setting.value for setting in start.settings()}
        return [
            setting for setting in self.settings() if setting.value != usual.get(setting.flag, setting.field.default)
        ]

    def list_comparable(self) -> dict[str, Any]:
        """Return the settings, by name, in which compared runs may differ.

        The method and the seed are left out.
        """
        return {
            setting.name: setting.value
            for setting in self.settings()
            if not setting.unread and setting.name not in _SAME_RUN
        }

    def as_read(self) -> "Config":
        """Replace each setting that nothing reads by its default."""
        topics = {name: as_read(getattr(self, name)) for name in TOPICS}
        if self.method.name in ALGORITHMS and not _different(self.method.name):
            topics["model"] = replace(topics["model"], architectures=ArchitectureOptions())
        options = self.method.options
        method = replace(self.method, options=None if options is None else as_read(options))
        return replace(self, **topics, method=method, extensions={n: as_read(o) for n, o in self.extensions.items()})

    def check(self) -> None:
        """Raise FLError for settings that do not go together, or invalid values.

        This comes before anything is loaded or written.
        """
        self.check_values()
        if not isinstance(ALGORITHMS[name := self.method.name], Method):
            raise FLError(f"ALGORITHMS[{name!r}] is no Method: put Method({name}) there")
        self.data.check()
        self.local.check(self.data.dataset)
        for setting in self.list_changed():
            if setting.unread:
                raise FLError(setting.unread)
        ALGORITHMS[self.method.name].refuse(self.asks())
        self.model.check()
        for name in self.extensions:
            EXTENSIONS[name].check(self)
        model_change(self.extensions)
        self.local.schedule(self.rounds)
        self.clients.cohort()
        self.model.architectures.announce(self.model.spec(self.data))

    def check_values(self) -> None:
        """Raise FLError for a value that a setting cannot have."""
        for name, kind in TOPICS.items():
            if not isinstance(value := getattr(self, name), kind):
                raise FLError(f"{name} of a Config is a {kind.__name__}, got {value!r}: give settings to Config.of")
        partitions = {name: kind.options for name, kind in KINDS.items()}
        for name, chosen, known, attribute in (
            ("algorithm", self.method, OPTIONS, "METHOD"),
            ("partition", self.data.partition, partitions, "KIND"),
        ):
            if not isinstance(chosen, Alternative):
                raise FLError(f"{name} of a Config is an Alternative, got {chosen!r}: give {name}= to Config.of")
            choice(f"--{name}", [chosen.name], known, attribute)
            if type(chosen.options) is not type(known[chosen.name]):
                raise FLError(f"{chosen.name} takes {type(known[chosen.name]).__name__}, got {chosen.options!r}")
        for name in self.extensions:
            if name not in EXTENSIONS:
                raise FLError(f"there is no extension {name!r}: there are {', '.join(EXTENSIONS)}", code="name")
        for setting in self.settings():
            check_value(setting)

    def check_recorded(self) -> None:
        """Raise FLError for an invalid value.

        Method, partition, data and model need not be here.
        """
        known = self if self.method.name in ALGORITHMS else replace(self, method=Config.method)
        if known.data.partition.name not in KINDS:
            known = replace(known, data=replace(known.data, partition=DataSettings.partition))
        known.check_values()
        self.clients.cohort()

    def check_registered(self, folder: Path) -> None:
        """Raise FLError if a run to resume is of a method that this process does not know."""
        if (name := self.method.name) not in ALGORITHMS:
            raise FLError(
                f"{folder} holds a run of {name}, which is no method of this installation: work with it from "
                "Python, after the lines that register it, as in "
                f"fl.simulate(fl.Config.read({str(folder)!r}), {str(folder)!r}, resume=True); or make it a file or a "
                "package (docs/guides/method.md), so that every command knows it",
                code="name",
            )

    def asks(self) -> dict[str, str]:
        """Return what a method must be able to do, and the flags that ask for it.

        See `fl.federation.capabilities`.
        """
        needs: dict[str, str] = {}
        local, model = self.local, self.model
        if local.masked_loss:
            needs["masked_logits"] = "--masked-loss"
        if local.loss not in ("default", "cross_entropy") or local.label_smoothing or local.class_weights:
            needs["any_loss"] = "--loss, --label-smoothing and --class-weights"
        if model.exits:
            needs["several_classifiers"] = "--exits"
        if model.architectures != ArchitectureOptions():
            needs["architectures"] = "--architectures"
        for name, options in self.extensions.items():
            needs |= EXTENSIONS[name].needs(options)
        return needs

    @property
    def fixes_rounds(self) -> bool:
        """True if the number of rounds changes earlier rounds: their learning rate, say."""
        drawn = any(EXTENSIONS[name].fixes_rounds(options) for name, options in self.extensions.items())
        return bool(SCHEDULES[self.local.lr_schedule]) or drawn

    def with_validation(self, chosen: bool = False) -> "Config":
        """Return the settings; samples are held out if the method needs some and has none.

        Args:
            chosen: whether somebody has asked for the share of the settings, so that it cannot be another one.

        Raises:
            FLError: if none are to be held out, and the method needs some.
        """
        name, method = self.method.name, ALGORITHMS.get(self.method.name)
        if self.data.local_valid or not (method and method.validates(self.method.options)):
            return self
        if chosen:
            raise FLError(
                f"--local-valid 0: {name} validates on samples that clients hold out; leave the flag out (for "
                f"{_HELD_OUT}) or give a share"
            )
        _log.warning(f"{name} validates on samples that clients hold out: --local-valid {_HELD_OUT} is taken")
        return self.replace(local_valid=_HELD_OUT)

    def fit_to(self, dataset: Dataset) -> "Config":
        """Move numbers left at their defaults into the limits that given data set."""
        if self.data.partition.name not in KINDS:  # as `check` says
            return self
        clients, least = self.clients.number, self.data.min_samples
        count = len(dataset.y) + self.data.pool_test_set * len(dataset.test_y)
        if KINDS[self.data.partition.name].partial and dataset.owners is not None and isinstance(clients, Default):
            owners, sizes = dataset.owners.unique(return_counts=True)
            if self.data.test_sites:
                sizes = sizes[~torch.isin(owners, dataset.number_of(self.data.test_sites))]
            able = int((sizes >= least).sum())
            clients = min(clients, able) or clients
        elif isinstance(least, Default) and not self.data.samples:
            least = min(least, max(1, count // clients))
        same = (clients, least) == (self.clients.number, self.data.min_samples)
        return self if same else self.replace(clients=clients, min_samples=least)

    def load(self) -> Dataset:
        """Load the data set of the settings."""
        return self.data.load(self.execution.data_root, self.execution.download)

    def title(self, methods: str = "", seeds: str = "") -> str:
        """Make a short name of the settings.

        Args:
            methods, seeds: of several runs.

        >>> Config().title(seeds="0,1")
        'fedmr-digits-cnn-dirichlet0.5-seed0,1'
        >>> Config.of(dataset="text:novels/emma.txt", model="transformer", partition="iid").title()
        'fedmr-emma-transformer-iid-seed0'
        >>> Config.of(dataset=GIVEN, model=GIVEN).title()
        'fedmr-custom-data-custom-model-dirichlet0.5-seed0'
        """
        dataset, model = self.data.dataset, self.model.name
        dataset = dataset if ":" not in dataset else Path(dataset.partition(":")[2].partition("?")[0]).stem
        dataset = "custom-data" if dataset == GIVEN else dataset
        model = "custom-model" if model == GIVEN else model.replace(":", "-")
        return f"{methods or self.method.name}-{dataset}-{model}-{self.data.spread()}-seed{seeds or self.seed}"

    def to_yaml(self) -> str:
        """Write the settings that a run reads as YAML by topic; `from_yaml` inverts it.

        >>> "momentum" in Config.of(optimizer="adam").to_yaml(), "unit: layer" in Config().to_yaml()
        (False, True)
        """
        return yaml.safe_dump(self.values(), sort_keys=False)

    def values(self) -> dict[str, Any]:
        """Return the settings that a run reads as plain mappings, nested by topic."""
        result: dict[str, Any] = {}
        left_out = EXTENSIONS.keys() - self.extensions.keys()
        for setting in self.settings():
            if not setting.unread and setting.path[0] not in left_out:
                path = (*setting.path, "name") if marks(setting.field, Alternatives) else setting.path
                *topic, last = path
                place = result
                for name in topic:
                    place = place.setdefault(name, {})
                place[last] = plain(setting.value)
        if self.method.name in SOURCES:
            result["method"][SOURCE] = SOURCES[self.method.name]
        return result

    @classmethod
    def from_yaml(cls, text: str, gone: bool = False) -> "Config":
        """Read the settings of one run from YAML; others have their defaults.

        Settings may also stand there by the names of their flags, outside of topics, as in files of version 0.2.

        Args:
            gone: see `fl.settings.stored.read`, which says what is an error and what is ignored.

        Raises FLError for the settings of several runs, too.

        >>> Config.from_yaml(Config.of(lr=0.5).to_yaml()) == Config.of(lr=0.5)
        True
        """
        values = stored.read(text, gone)
        methods, seeds = values.pop("algorithms", (METHOD,)), values.pop("seeds", (0,))
        if len(methods) != 1 or len(seeds) != 1:
            raise FLError(
                "it names several methods or seeds, and a Config is one run: read it as an fl.Experiment, or take the "
                "folder of one of its runs"
            )
        for name in [name for name in values if name in ALGORITHMS and name not in methods]:
            _log.warning("warning: section %s is ignored, since this run does not read it", name)
            del values[name]
        return cls().replace(algorithm=methods[0], seed=seeds[0], **values)

    @classmethod
    def read(cls, folder: str | Path, resume: bool = False) -> "Config":
        """Read the settings of a run folder.

        Args:
            resume: whether its run is to resume, which a run with settings that are gone cannot.
        """
        with stored.in_folder(Path(folder), resume) as text:
            return cls.from_yaml(text, gone=True)


def plain(value: Any) -> Any:
    """Return a list for a tuple, and a number for a default, which YAML does not know."""
    return list(value) if isinstance(value, tuple) else int(value) if isinstance(value, Default) else value


def _different(method: str) -> bool:
    """Return whether clients of a method differ in architecture."""
    return getattr(ALGORITHMS[method], "clients", None) == "heterogeneous"


def _partition(before: Alternative, settings: dict[str, Any]) -> Alternative:
    """Take the partition and its options out of settings by name."""
    wanted = partition_named(settings.pop("partition", before))
    partition = _choose(before, wanted, {name: kind.options for name, kind in KINDS.items()}, shared=True)
    known = () if partition.options is None else [option.name for option in fields(partition.options)]
    changes = {name: settings.pop(name) for name in known if name in settings}
    changes = {name: _as_tuple(value) for name, value in changes.items()}
    return replace(partition, options=replace(partition.options, **changes)) if changes else partition


def _as_tuple(value: Any) -> Any:
    """Return NumPy's values as Python's, and a list as a tuple, as in settings."""
    return tuple(as_plain(value)) if isinstance(value, list) else as_plain(value)


def _choose(before: Alternative, wanted: Any, options: Mapping[str, Any], shared: bool = False) -> Alternative:
    """Return an alternative by name, with default options or those already set.

    Args:
        shared: whether others keep the options that are set if they have the same ones.
    """
    if isinstance(wanted, Alternative):
        return wanted
    usual = options.get(wanted) if isinstance(wanted, str) else None
    same = before.name == wanted or (shared and usual is not None and type(before.options) is type(usual))
    return Alternative(wanted, before.options if same else usual)


def options_of(name: str, value: Any, now: Any) -> Any:
    """Return options to replace a group's; a mapping replaces some of them."""
    if isinstance(value, Mapping) and is_dataclass(now) and not isinstance(now, type):
        known = [option.name for option in fields(now)]
        if strange := value.keys() - {*known}:
            raise FLError(f"unknown setting {name}.{min(strange)}: there are {', '.join(known)}", code="name")
        return replace(now, **{name: _as_tuple(item) for name, item in value.items()})
    if not isinstance(value, type(now)):
        raise FLError(f"{name} takes {type(now).__name__} or a mapping of some of its settings, got {short(value)}")
    return value


def _stray(name: str, partition: str, method: str) -> str:
    """Say why a name is none of a setting of this run."""
    flag = flag_of(name)
    if able := [kind for kind, entry in KINDS.items() if name in entry.reads]:
        some = " or ".join(filter(None, (", ".join(able[:-1]), able[-1])))
        return f"--{flag} is for --partition {some}, not for {partition}: leave it out, or give --partition {some}"
    if name in ALGORITHMS:
        return f"{name}= is for algorithm={name!r}, and this run is of {method}: leave it out, or take that method"
    if name in ("algorithms", "seeds"):
        return f"a Config is one run, and {name} are several: give them to fl.Experiment.of"
    return stored.describe_unknown(name)
