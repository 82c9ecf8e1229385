"""The settings of a run: check them, write them as YAML, read them."""

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any

import yaml

from fl import data
from fl.algorithms import ALGORITHMS, OPTIONS, methods_of
from fl.algorithms.method import Method
from fl.base.errors import FLError
from fl.base.files import regular
from fl.base.settings import (
    Default,
    Kind,
    Setting,
    changed,
    check_read,
    check_values,
    described,
    flag_of,
    from_yaml,
    lowered_defaults,
    settings_of,
    without_unread,
)
from fl.data import GIVEN
from fl.models.architectures import ArchitectureOptions
from fl.models.init import check_init
from fl.settings.extensions import EXTENSIONS
from fl.settings.fields import ExtensionOptions, Fields, MethodOptions
from zoo import ZooError
from zoo.plain_yaml import read_yaml

_SOURCES = ("config", "resume")
"""Settings that say where the others come from."""
_HELD_OUT = 0.1
"""Of each client's samples, for a method that validates, where the settings hold none out."""
_RENAMED = {
    "chunk": "max-parallel-clients",
    "pool": "pool-test-set",
    "models-every": "eval-client-models-every",
    "fedmr.fraction": "fedmr.segment-fraction",
    "femam.lam": "femam.prox",
    "femam.lam-everywhere": "femam.prox-all-levels",
    "femam.epsilon": "femam.min-gain",
    "joining": "presence.joining",
    "leaving": "presence.leaving",
}
"""From flags of earlier versions to what they are called now."""
_GONE = {
    "jobs": "several commands, as a shell loop or xargs -P starts them",
    "activation-checkpointing": "torch.utils.checkpoint in a model of your own",
    **dict.fromkeys(("attack.kind", "attack.target", "attack.size"), "data of your own that bear the trigger"),
    "sample-privacy": "Opacus",
    "secure-aggregation": "an app of Flower's own",
}
"""From flags and groups of earlier versions that are gone to what a user takes instead."""
_MOVED = {"joining": "presence", "leaving": "presence"}
"""From settings to the groups where they are now; files of earlier versions have them outside."""
_log = logging.getLogger("fl")


@dataclass(frozen=True)
class Config(MethodOptions, Fields):
    """Federated training of models that are cut and sewn, with FedMR on real digits as the default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        with suppress(TypeError):  # of wrong types, which `check` explains
            for name in OPTIONS.keys() & set(self.algorithm):
                options = self.options_of(name)
                lowered = lowered_defaults(options, [one.name for one in fields(options)], self.clients)
                if lowered:
                    object.__setattr__(self, name, replace(options, **lowered))

    def check(self) -> None:
        """Raise FLError for settings that do not go together, and values that a setting cannot have.

        This comes before anything is loaded or written.
        """
        if wrong := [name for name, method in ALGORITHMS.items() if not isinstance(method, Method)]:
            raise FLError(f"ALGORITHMS[{wrong[0]!r}] is no Method: put Method({wrong[0]}) there")
        self.check_data()
        if not self.algorithm or not self.seeds:
            raise FLError("give at least one --algorithm and one of --seeds")
        if len(set(self.algorithm)) < len(self.algorithm) or len(set(self.seeds)) < len(self.seeds):
            raise FLError("--algorithm and --seeds: name each method and each seed only once")
        if len(self.betas) != 2:
            raise FLError(f"--betas takes two numbers, got {','.join(map(str, self.betas))}")
        if self.nesterov and not self.momentum:
            raise FLError("--nesterov needs a --momentum above 0")
        if self.pool_test_set and not self.local_test:
            raise FLError(
                "--pool-test-set leaves no test set, so clients have to hold samples out: give --local-test, such as "
                "0.17"
            )
        if data.is_text(self.dataset) and (
            wrong := [name for name in ("crop", "flip", "masked_loss") if getattr(self, name)]
        ):
            raise FLError(f"--{flag_of(wrong[0])} is for images, and the data set is text: leave it out")
        # Options of methods that are not run are let through: from Python, one Config may serve several.
        check_read(self, [one.flag for one in changed(self, type(self)()) if one.group not in ALGORITHMS])
        uniform = [name for name in self.algorithm if name not in methods_of("heterogeneous")]
        if uniform and self.architectures != ArchitectureOptions():
            able = ", ".join(methods_of("heterogeneous"))
            raise FLError(
                f"--architectures are for {able}: {uniform[0]} gives all clients one model; leave them out, or make "
                "your own method a Method(..., clients='heterogeneous')"
            )
        for name in self.algorithm:
            ALGORITHMS[name].refuse(self.asks())
        if self.adapters.on and self.architectures != ArchitectureOptions():
            raise FLError(
                "--adapters.kind: clients have one base, and --architectures gives them several: leave one out"
            )
        self.adapters.check()
        if self.init is not None:
            check_init(self.init, self.model)
        self.architectures.check()
        self.schedule()
        self.cohort()
        self.architectures.announce(self.spec())

    def check_recorded(self) -> None:
        """Raise FLError for a value that a setting cannot have; the method, data and model need not be here."""
        check_values(replace(self, algorithm=tuple(name for name in self.algorithm if name in ALGORITHMS)))
        self.cohort()

    def check_registered(self, folder: Path) -> None:
        """Raise FLError if a run that is to go on is of a method that this process does not know."""
        if unknown := [name for name in self.algorithm if name not in ALGORITHMS]:
            raise FLError(
                f"{folder} holds a run of {unknown[0]}, which is no method of this installation: work with it from "
                "Python, after the lines that register it, as in "
                f"fl.simulate(fl.Config.read({str(folder)!r}), {str(folder)!r}, resume=True); or make it a file or a "
                "package (docs/guides/method.md), so that every command knows it"
            )

    def options_of(self, name: str) -> Any:
        """The options of a method as they are set here; its defaults, if a script has registered it.

        >>> Config().options_of("fedprox")
        FedProxOptions(mu=0.01)
        """
        default, own = ALGORITHMS[name].options, getattr(self, name, None)
        return own if isinstance(own, type(default)) else default

    def holding_out(self, chosen: bool = False) -> "Config":
        """The settings, with samples held out if one of their methods validates on them and they hold none out.

        Args:
            chosen: whether somebody has asked for the share of the settings, so that it cannot be another one.

        Raises:
            FLError: if none are to be held out, and a method needs some.
        """
        for name in () if self.local_valid else self.algorithm:
            if (method := ALGORITHMS.get(name)) and method.validates(self.options_of(name)):
                if chosen:
                    raise FLError(
                        f"--local-valid 0: {name} validates on samples that clients hold out; leave the flag out (for "
                        f"{_HELD_OUT}) or give a share"
                    )
                _log.warning(f"{name} validates on samples that clients hold out: --local-valid {_HELD_OUT} is taken")
                return replace(self, local_valid=_HELD_OUT)
        return self

    def group_unread(self, group: str) -> str:
        """Why nothing reads a group of settings. A method that is not registered here may read --architectures."""
        methods = ",".join(self.algorithm)
        if group in ALGORITHMS and group not in self.algorithm:
            return f"is for {group}, which is not in --algorithm {methods}: leave it out, or add {group}"
        able = methods_of("heterogeneous")
        if group == "architectures" and all(name in ALGORITHMS and name not in able for name in self.algorithm):
            return f"is for {', '.join(able)}: all clients of {methods} have one model; leave it out"
        return super().group_unread(group)

    def settings(self) -> list[Setting]:
        """The settings that a run of these reads, and no others.

        >>> flags = {setting.flag for setting in Config(algorithm="fedavg").settings()}
        >>> "lr" in flags, "fedmr.segment-fraction" in flags, "betas" in flags, "resume" in flags
        (True, False, False, False)
        """
        return [one for one in settings_of(self) if not one.unread and one.name not in _SOURCES]

    def runs(self) -> list["Config"]:
        """One config for each method and seed, each with the options that its method reads."""
        each = [replace(self, algorithm=(a,), seeds=(s,)) for a in self.algorithm for s in self.seeds]
        return [without_unread(one) for one in each]

    def title(self) -> str:
        """A short name made from the settings.

        >>> Config(seeds=(0, 1)).title()
        'fedmr-digits-cnn-dirichlet0.5-seed0,1'
        >>> Config(dataset="text:novels/emma.txt", model="transformer", partition="iid").title()
        'fedmr-emma-transformer-iid-seed0'
        >>> Config(dataset=GIVEN, model=GIVEN).title()
        'fedmr-custom-data-custom-model-dirichlet0.5-seed0'
        """
        dataset = self.dataset if ":" not in self.dataset else Path(self.dataset.partition(":")[2]).stem
        dataset = "custom-data" if self.dataset == GIVEN else dataset
        model = "custom-model" if self.model == GIVEN else self.model.replace(":", "-")
        seeds = ",".join(map(str, self.seeds))
        return f"{','.join(self.algorithm)}-{dataset}-{model}-{self.spread()}-seed{seeds}"

    def to_yaml(self) -> str:
        """The settings that a run reads as YAML, those of a group in a mapping of its own.

        Those that say where they come from are left out. `from_yaml` is the inverse for settings whose others have
        their defaults.

        >>> "momentum" in Config(optimizer="adam").to_yaml(), "fedprox" in Config(algorithm="fedavg").to_yaml()
        (False, False)
        """
        result: dict[str, Any] = {}
        for setting in self.settings():
            place = result.setdefault(setting.group, {}) if setting.group else result
            place[setting.field.name] = plain(setting.value)
        return yaml.safe_dump(result, sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str, gone: bool = False) -> "Config":
        """The settings from YAML; settings that it leaves out have their defaults.

        A section that is not known here, or has something in it that is not, is ignored with a warning if these
        settings do not read it: a method's file may be gone or have other options by now.

        Args:
            gone: whether the text may name settings that are gone, which are then left out.

        Raises FLError for text that is not YAML, a setting that is there twice, unknown settings that are read and
        values of a wrong type.

        >>> Config.from_yaml(Config(lr=0.5).to_yaml()) == Config(lr=0.5)
        True
        """
        try:
            values, names = _without_gone(read_yaml(text))
            if names and not gone:
                raise FLError(f"{_are_gone(names)}; delete these lines")
            return cls._from_values(_moved(values))
        except (FLError, ZooError) as error:
            raise FLError(f"not the settings of a run: {error}") from None

    @classmethod
    def _from_values(cls, values: Any) -> "Config":
        if not isinstance(values, dict):
            raise FLError("it is not a mapping")
        if strange := [name for name in _SOURCES if name in values]:
            raise FLError(f"{strange[0]} is a flag, which no file of settings has")
        sections = {name: value for name, value in values.items() if isinstance(value, dict)}
        config = _filled(cls(), {name: value for name, value in values.items() if name not in sections})
        for name, section in sections.items():
            known = hasattr(config, name)
            try:
                config = _filled(config, {name: section})
            except FLError as why:
                if known and not config.group_unread(name):
                    raise
                _log.warning("warning: section %s is ignored, since this run does not read it (%s)", name, why)
        return config

    @classmethod
    def from_file(cls, path: Path) -> "Config":
        """The settings in a YAML file, such as the config.yaml of a run.

        Where that run lies is left out if it was named: a run of the same settings has a folder of its own. Raises
        FLError, which names the file.
        """
        if path.exists() and not path.is_file():
            raise FLError(f"--config {path} is not a regular file: give a YAML file, such as the config.yaml of a run")
        try:
            config = cls.from_yaml(path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise FLError(f"--config {path} cannot be read: {reason}") from None
        except FLError as error:
            raise FLError(f"--config {path}: {error}") from None
        if config.name == path.resolve().parent.name:
            return replace(config, out=cls.out, name=None)
        return config

    @classmethod
    def read(cls, folder: str | Path, resume: bool = False) -> "Config":
        """The settings of a run folder.

        Args:
            resume: whether its run is to go on, which a run with settings that are gone cannot.
        """
        path = Path(folder) / "config.yaml"
        try:
            text = regular(path).read_text()
        except (OSError, UnicodeDecodeError):
            raise FLError(f"{folder} is not a run folder: it has no config.yaml that can be read") from None
        try:
            names = _without_gone(read_yaml(text))[1] if resume else []
            if names:  # without the lines it would be another run
                raise FLError(f"{_are_gone(names)}; go on with the version that began the run")
            config = cls.from_yaml(text, gone=True)
            for name, section in read_yaml(text).items() if resume else ():
                if isinstance(section, dict) and not hasattr(config, name) and name not in config.algorithm:
                    raise FLError(f"this run was made with {name}, which is not installed here: install it, and go on")
            return config
        except (FLError, ZooError) as error:
            raise FLError(f"{path}: {error}") from None


def plain(value: Any) -> Any:
    """A list in the place of a tuple, and a number in that of a default, which YAML does not know."""
    return list(value) if isinstance(value, tuple) else int(value) if isinstance(value, Default) else value


def check_renamed(flags: Iterable[str]) -> None:
    """Raise FLError for the first flag of an earlier version, written without its dashes."""
    for flag in flags:
        if flag in _RENAMED:
            raise FLError(f"--{flag} is now --{_RENAMED[flag]}")
        if names := {flag, flag.partition(".")[0]} & _GONE.keys():
            raise FLError(f"{_are_gone(names)}; leave it out")


def _are_gone(names: Iterable[str]) -> str:
    """Name settings that are gone, each with what a user takes instead."""
    return ", ".join(f"--{name} is gone (instead: {_GONE[name]})" for name in names)


def _without_gone(values: Any, group: str = "") -> tuple[Any, list[str]]:
    """Return the values of settings without those that are gone, and the names of these."""
    if not isinstance(values, dict):
        return values, []
    rest, names = {}, []
    for name, value in values.items():
        if (flag := flag_of(str(name), group)) in _GONE:
            names.append(flag)
        else:
            rest[name], inside = _without_gone(value, flag)
            names += inside
    return rest, names


def _moved(values: Any) -> Any:
    """Return the values of settings, each in the group where it is now."""
    if not isinstance(values, dict):
        return values
    kept = {name: value for name, value in values.items() if name not in _MOVED}
    for name in values.keys() & _MOVED.keys():
        kept[_MOVED[name]] = {**kept.get(_MOVED[name], {}), name: values[name]}
    return kept


def _filled(default: Kind, values: dict[str, Any], group: str = "") -> Kind:
    """A dataclass with the given values, each of the type that its field has."""
    types, where, result = {field.name: field.type for field in fields(default)}, f"{group}." if group else "", {}
    for name, value in values.items():
        if name not in types:
            check_renamed([flag_of(str(name), group)])
            raise FLError(f"unknown setting {where}{name}")
        if is_dataclass(old := getattr(default, name)):
            if not isinstance(value, dict):
                raise FLError(f"{name} is not a mapping")
            result[name] = _filled(old, value, name)
            continue
        try:
            result[name] = from_yaml(types[name], value)
        except TypeError:
            share = "; a share of the clients is participation" if name == "participants" else ""
            wanted = described(types[name])
            raise FLError(f"{where}{name} cannot be {short(value)}: give {wanted}{share}") from None
    return replace(default, **result)


for _name in EXTENSIONS:
    if _name in ALGORITHMS or any(_name in vars(_base) for _base in Config.__mro__ if _base is not ExtensionOptions):
        raise FLError(f"an extension cannot be called {_name!r}, which is a setting or a method already: rename it")
for _name in OPTIONS:  # a method's options must not hide a setting or a method of Config
    if hasattr(Fields, _name) or _name in vars(Config):
        raise FLError(f"a method with options cannot be called {_name!r}, which is a setting already: rename it")
