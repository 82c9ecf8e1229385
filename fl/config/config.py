"""The settings of a run: check them, write them as YAML, read them."""

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from fl.algorithms import ALGORITHMS, OPTIONS
from fl.base.errors import FLError
from fl.base.files import regular
from fl.config.checks import check
from fl.config.fields import Fields, MethodOptions
from fl.config.yaml_settings import filled, flat, with_lists
from fl.data import GIVEN

_SOURCES = ("config", "resume")
"""Settings that say where the others come from."""


@dataclass(frozen=True)
class Config(MethodOptions, Fields):
    """Federated training of models that are cut and sewn, with FedMR on real digits as the default."""

    def check(self) -> None:
        """Raise FLError for settings that cannot be run, before anything is loaded or written."""
        check(self)

    def check_options(self, start: "Config", swept: str = "") -> None:
        """Raise FLError for an option, also of a method, that was changed from `start` while nothing reads it."""
        super().check_options(start, swept)
        for name in ALGORITHMS:
            if name not in self.algorithm and getattr(self, name, None) != getattr(start, name, None):
                said, usual = (flat({name: dataclasses.asdict(getattr(c, name))}) for c in (self, start))
                flag = next(flag for flag in said if said[flag] != usual[flag])
                raise FLError(
                    f"--{flag} is for {name}, which is not in --algorithm {','.join(self.algorithm)}: leave it out, or "
                    f"add {name}"
                )

    def runs(self) -> list["Config"]:
        """One config for each method and seed."""
        return [replace(self, algorithm=(a,), seeds=(s,)) for a in self.algorithm for s in self.seeds]

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

    def to_yaml(self) -> str:
        """The settings as YAML, without those that say where they come from. `from_yaml` is the inverse."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if name not in _SOURCES}
        return yaml.safe_dump(with_lists(values), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> "Config":
        """The settings from YAML; settings that it leaves out have their defaults.

        Raises FLError for text that is not YAML, unknown settings and values of a wrong type.

        >>> Config.from_yaml(Config(lr=0.5).to_yaml()) == Config(lr=0.5)
        True
        """
        try:
            values = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError) as error:
            raise FLError(f"not the settings of a run: this is not YAML ({' '.join(str(error).split())})") from None
        if isinstance(values, dict) and (strange := [name for name in _SOURCES if name in values]):
            raise FLError(f"not the settings of a run: {strange[0]} is a flag, which no file of settings has")
        return filled(cls(), values, "")

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
            raise FLError(f"{folder} is not a run folder: it has no config.yaml that can be read") from None
        try:
            return cls.from_yaml(text)
        except FLError as error:
            raise FLError(f"{path}: {error}") from None


for _name in OPTIONS:  # a method's options must not hide a setting or a method of Config
    if hasattr(Fields, _name) or _name in vars(Config):
        raise FLError(f"a method with options cannot be called {_name!r}, which is a setting already: rename it")
