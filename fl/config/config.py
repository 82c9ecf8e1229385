"""The settings of a run: check them, write them as YAML, read them."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from fl.algorithms import ALGORITHMS, OPTIONS, is_mixed
from fl.base.errors import FLError
from fl.base.files import regular
from fl.base.settings import Setting, settings_of, without_unread
from fl.config.checks import check
from fl.config.fields import Fields, MethodOptions
from fl.config.yaml_settings import filled, nested
from fl.data import GIVEN

_SOURCES = ("config", "resume")
"""Settings that say where the others come from."""
_log = logging.getLogger("fl")


@dataclass(frozen=True)
class Config(MethodOptions, Fields):
    """Federated training of models that are cut and sewn, with FedMR on real digits as the default."""

    def check(self) -> None:
        """Raise FLError for settings that cannot be run, before anything is loaded or written."""
        check(self)

    def group_unread(self, group: str, swept: str = "") -> str:
        """Why nothing reads a group of settings: the options of a method that is not run, architectures of methods
        whose clients have one (a method that is not registered here may read them), or options of text.
        """
        methods = ",".join(self.algorithm)
        if group in ALGORITHMS and group not in self.algorithm:
            return f"is for {group}, which is not in --algorithm {methods}: leave it out, or add {group}"
        if group == "architectures" and all(name in ALGORITHMS and not is_mixed(name) for name in self.algorithm):
            able = ", ".join(filter(is_mixed, ALGORITHMS))
            return f"is for {able}: all clients of {methods} have one model; leave it out"
        return super().group_unread(group, swept)

    def settings(self, swept: str = "") -> list[Setting]:
        """The settings that a run of these reads, and no others.

        Args:
            swept: the flag that will have several values, each of which may read others.

        >>> flags = {setting.flag for setting in Config(algorithm="fedavg").settings()}
        >>> "lr" in flags, "fedmr.fraction" in flags, "betas" in flags, "resume" in flags
        (True, False, False, False)
        """
        return [one for one in settings_of(self, swept) if not one.unread and one.name not in _SOURCES]

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
        'fedmr-own-data-own-model-dirichlet0.5-seed0'
        """
        dataset = self.dataset if ":" not in self.dataset else Path(self.dataset.partition(":")[2]).stem
        dataset = "own-data" if self.dataset == GIVEN else dataset
        model = "own-model" if self.model == GIVEN else self.model.replace(":", "-")
        seeds = ",".join(map(str, self.seeds))
        return f"{','.join(self.algorithm)}-{dataset}-{model}-{self.spread()}-seed{seeds}"

    def to_yaml(self, swept: str = "") -> str:
        """The settings that a run reads as YAML, without those that say where they come from. `from_yaml` is the
        inverse for settings whose others have their defaults.

        Args:
            swept: the flag that will have several values, each of which may read others.

        >>> "momentum" in Config(optimizer="adam").to_yaml(), "fedprox" in Config(algorithm="fedavg").to_yaml()
        (False, False)
        """
        return yaml.safe_dump(nested(self.settings(swept)), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> "Config":
        """The settings from YAML; settings that it leaves out have their defaults. A section that is not known here, or
        has something in it that is not, is ignored with a warning if these settings do not read it: a method's file may
        be gone or have other options by now.

        Raises FLError for text that is not YAML, unknown settings that are read and values of a wrong type.

        >>> Config.from_yaml(Config(lr=0.5).to_yaml()) == Config(lr=0.5)
        True
        """
        try:
            values = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError) as error:
            raise FLError(f"not the settings of a run: this is not YAML ({' '.join(str(error).split())})") from None
        if isinstance(values, dict) and (strange := [name for name in _SOURCES if name in values]):
            raise FLError(f"not the settings of a run: {strange[0]} is a flag, which no file of settings has")
        if not isinstance(values, dict):
            return filled(cls(), values, "")
        sections = {name: value for name, value in values.items() if isinstance(value, dict)}
        config = filled(cls(), {name: value for name, value in values.items() if name not in sections}, "")
        for name, section in sections.items():
            known = hasattr(config, name)
            try:
                config = filled(config, {name: section}, "")
            except FLError as error:
                if known and not config.group_unread(name):
                    raise
                why = str(error).removeprefix("not the settings of a run: ")
                _log.warning("warning: section %s is ignored, since this run does not read it (%s)", name, why)
        return config

    @classmethod
    def from_file(cls, path: Path) -> "Config":
        """The settings in a YAML file, such as the config.yaml of a run, without where that run lies if it was named: a
        run of the same settings has a folder of its own. Raises FLError, which names the file.
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
    def read(cls, folder: str | Path) -> "Config":
        """The settings of a run folder."""
        path = Path(folder) / "config.yaml"
        try:
            text = regular(path).read_text()
        except (OSError, UnicodeDecodeError):
            if (path.parent / "sweep.yaml").is_file():
                raise FLError(
                    f"{folder} holds a sweep, not a run: give one of the folders in it, or go on with "
                    f"`python -m fl.sweep --resume {folder}`"
                ) from None
            raise FLError(f"{folder} is not a run folder: it has no config.yaml that can be read") from None
        try:
            return cls.from_yaml(text)
        except FLError as error:
            raise FLError(f"{path}: {error}") from None


for _name in OPTIONS:  # a method's options must not hide a setting or a method of Config
    if hasattr(Fields, _name) or _name in vars(Config):
        raise FLError(f"a method with options cannot be called {_name!r}, which is a setting already: rename it")
