"""Several runs that are compared: methods and seeds, in otherwise equal settings."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fl.algorithms import ALGORITHMS
from fl.base.errors import FLError
from fl.base.settings import as_plain
from fl.models.architectures import ArchitectureOptions
from fl.settings import stored
from fl.settings.config import Config, options_of
from fl.settings.places import METHOD, method_named
from zoo import ZooError


@dataclass(frozen=True)
class Experiment:
    """Several methods, each with several seeds, in otherwise equal settings.

    `Experiment.of` takes what `Config.of` takes, with algorithms and seeds in the plural.

    Attributes:
        config: what the runs have in common.
        options: of methods by name, where they are not the defaults; methods that are not run may have some.

    >>> experiment = Experiment.of(algorithms=("fedavg", "fedprox"), seeds=(0, 1), rounds=10)
    >>> [(run.method.name, run.seed) for run in experiment.runs()]
    [('fedavg', 0), ('fedavg', 1), ('fedprox', 0), ('fedprox', 1)]
    """

    config: Config = Config()
    algorithms: tuple[str, ...] = (METHOD,)
    seeds: tuple[int, ...] = (0,)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self.algorithms.split(",") if isinstance(self.algorithms, str) else self.algorithms
        names = names if isinstance(names, tuple | list) else (names,)
        seeds = as_plain(list(self.seeds) if isinstance(self.seeds, range) else self.seeds)
        object.__setattr__(self, "algorithms", tuple(map(method_named, names)))
        object.__setattr__(self, "seeds", tuple(seeds) if isinstance(seeds, tuple | list) else (seeds,))

    def __repr__(self) -> str:
        """Write what `Experiment.of` takes to make this experiment.

        >>> Experiment.of(algorithms=("fedavg", "fedmr"), rounds=5)
        Experiment.of(algorithms=('fedavg', 'fedmr'), seeds=(0,), rounds=5)
        """
        common = repr(self.config.replace(algorithm=METHOD, seed=0)).removeprefix("Config.of(").removesuffix(")")
        options = [f"{name}={asdict(value)!r}" for name, value in self.options.items() if is_dataclass(value)]
        arguments = [f"algorithms={self.algorithms!r}", f"seeds={self.seeds!r}", *filter(None, [common]), *options]
        return f"Experiment.of({', '.join(arguments)})"

    @classmethod
    def of(cls, **settings: Any) -> "Experiment":
        """Make an experiment from names as in `Config.of`, with algorithms and seeds."""
        return cls().replace(**settings)

    @classmethod
    def alone(cls, config: Config) -> "Experiment":
        """Make an experiment of one run."""
        options = {} if config.method.options is None else {config.method.name: config.method.options}
        return cls(config, (config.method.name,), (config.seed,), options)

    def replace(self, /, **settings: Any) -> "Experiment":
        """Return the experiment with some settings replaced, named as `of` has them."""
        top_level = {name: settings.pop(name) for name in ("algorithms", "seeds") if name in settings}
        for name, other in (("algorithm", "algorithms"), ("seed", "seeds")):
            if name in settings:
                raise FLError(f"an experiment has several {other}: give {other}= in the place of {name}=")
        changed = replace(self, **top_level)  # which adds methods by import paths to those there are
        options = dict(self.options)
        for name in [key for key in settings if key in ALGORITHMS and ALGORITHMS[key].options is not None]:
            options[name] = options_of(name, settings.pop(name), options.get(name, ALGORITHMS[name].options))
        return replace(changed, config=self.config.replace(**settings), options=options)

    def runs(self) -> list[Config]:
        """List the settings of each run, method by method."""
        return [self._run(name).replace(seed=seed) for name in self.algorithms for seed in self.seeds]

    def _run(self, name: str) -> Config:
        options = {name: self.options[name]} if isinstance(name, str) and name in self.options else {}
        return self.config.replace(algorithm=name, **options)

    def as_read(self) -> "Experiment":
        """Replace settings that no run reads by defaults, and forget unused options."""
        runs = [run.as_read() for run in self.runs() or [self.config]]
        config = next((run for run in runs if run.model.architectures != ArchitectureOptions()), runs[0])
        if len(self.algorithms) > 1:
            config = replace(config, method=self.config.method, seed=self.config.seed)
        options = {name: group for name, group in self.options.items() if name in self.algorithms}
        return replace(self, config=config, options=options)

    def check(self) -> None:
        """Raise FLError for settings of a run that do not go together, see `Config.check`."""
        if not self.algorithms or not self.seeds:
            raise FLError("give at least one --algorithm and one of --seeds")
        if any(several.count(item) > 1 for several in (self.algorithms, self.seeds) for item in several):
            raise FLError("--algorithm and --seeds: name each method and each seed only once")
        for run in self.runs():
            run.check()

    def with_validation(self, chosen: bool = False) -> "Experiment":
        """Return the experiment, with samples held out if one of its runs needs some."""
        for name in self.algorithms:
            run = self._run(name)
            if (held := run.with_validation(chosen)) is not run:
                return self.replace(local_valid=held.data.local_valid)
        return self

    def title(self) -> str:
        """Make a short name of the settings."""
        return self.config.title(",".join(self.algorithms), ",".join(map(str, self.seeds)))

    def to_yaml(self) -> str:
        """Write the settings of all runs as YAML; of one run as `Config.to_yaml` does."""
        runs = self.runs()
        if len(runs) == 1:
            return runs[0].to_yaml()
        values: dict[str, Any] = {"algorithm": list(self.algorithms), "seeds": list(self.seeds)}
        for run in runs:
            sections = run.values()
            method, _ = sections.pop("method"), sections.pop("seed")
            values |= {name: {**values.get(name, {}), **value} if isinstance(value, dict) else value
                       for name, value in sections.items()}  # fmt: skip
            name = method.pop("name")
            values |= {name: method} if method else {}
        return yaml.safe_dump({name: value for name, value in values.items() if value != {}}, sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str, gone: bool = False) -> "Experiment":
        """Read the settings of an experiment or a run from YAML, see `Config.from_yaml`."""
        return cls().replace(**stored.read(text, gone))

    @classmethod
    def from_file(cls, path: Path) -> "Experiment":
        """Read the settings in a YAML file, such as the config.yaml of a run.

        Raises FLError, which names the file.
        """
        if path.exists() and not path.is_file():
            raise FLError(
                f"--config {path} is not a regular file: give a YAML file, such as the config.yaml of a run",
                code="file",
            )
        try:
            return cls.from_yaml(path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise FLError(f"--config {path} cannot be read: {reason}", code="file") from None
        except (FLError, ZooError) as error:
            raise FLError(f"--config {path}: {error}", code=error.code) from None

    @classmethod
    def read(cls, folder: Path, resume: bool = False) -> "Experiment":
        """Read the settings of a run folder, or of the folder of several runs.

        Args:
            resume: whether they are to resume, which runs of earlier versions cannot.
        """
        with stored.in_folder(folder, resume) as text:
            return cls.from_yaml(text, gone=True)
