"""All settings of a run: the fields are the flags of `python -m fl.run`."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml
from tyro.constructors import PrimitiveConstructorSpec

import zoo
from fl.algorithms import ALGORITHMS, FedMROptions, FedProxOptions
from fl.data import DATASETS
from fl.engine import backend_names
from fl.errors import FLError


def _comma_separated(parse: Callable[[str], Any], metavar: str) -> PrimitiveConstructorSpec:
    def from_strings(strings: list[str]) -> tuple:
        return tuple(parse(item.strip()) for item in strings[0].split(",") if item.strip())

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=from_strings,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(str, value))],
    )


Names = Annotated[tuple[str, ...], _comma_separated(str, "NAME,...")]
Integers = Annotated[tuple[int, ...], _comma_separated(int, "INT,...")]


@dataclass(frozen=True)
class Config:
    """Federated training of models that are cut and sewn, with FedMR on real digits as the default."""

    algorithm: Names = ("fedmr",)
    """methods, comma-separated: fedavg, fedprox, fedmr, indep. Several run on the same splits and are compared"""
    dataset: str = "digits"
    """digits (bundled), fashion-mnist or cifar10"""
    model: str = "cnn"
    """cnn (McMahan et al. 2017) or resnet20"""
    width: float = 1.0
    """rate of the model's hidden widths"""
    norm: str = "default"
    """norm layers: batch, group, none, or the model's default"""

    clients: int = 20
    """number of clients that share out the training data"""
    participants: int | float = 5
    """clients that train in a round: a count (5), or a share with a decimal point (0.25)"""
    rounds: int = 40
    """communication rounds"""
    local_epochs: int = 5
    """passes of a client over its data in a round"""
    batch_size: int = 10
    """samples of a step"""
    lr: float = 0.02
    """learning rate of the clients' SGD"""
    momentum: float = 0.9
    """momentum of the clients' SGD; its buffer starts afresh every round"""
    weight_decay: float = 0.0
    """weight decay of the clients' SGD"""

    partition: str = "dirichlet"
    """how labels are spread over clients: iid or dirichlet"""
    alpha: float = 0.5
    """Dirichlet concentration: smaller is more heterogeneous"""
    min_samples: int = 10
    """samples that every client gets at least"""
    local_valid: float = 0.0
    """share of each client's samples held out to validate on"""
    local_test: float = 0.0
    """share of each client's samples held out to test on"""

    fedprox: FedProxOptions = FedProxOptions()
    fedmr: FedMROptions = FedMROptions()

    seeds: Integers = (0,)
    """one run each; a seed fixes the split, the initial weights, the sampling and the batches"""
    eval_every: int = 1
    """rounds between evaluations of the global model (and of clients' held-out data)"""
    models_every: int = 1
    """rounds between evaluations of each of the participants' models; 0 leaves them out"""
    checkpoint_every: int = 10
    """rounds between checkpoints (one more at the end, and on Ctrl-C)"""

    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU if there is one"""
    backend: str = "auto"
    """how a round's clients train: loop (one after another), vmap (side by side), or what was measured faster"""
    data_root: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """where data sets lie [$FL_DATA_ROOT, else ~/.cache/layer-surgery]"""
    download: bool = True
    """fetch a data set that is missing"""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = "runs"
    """parent of run folders"""
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """the run folder's name; must be new [made from the settings]"""
    resume: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """continue the run in this folder, with its settings; --rounds may be raised"""

    def check(self) -> None:
        """Raise FLError for a setting that cannot be run, before anything is loaded or written."""
        _choice("algorithm", self.algorithm, ALGORITHMS)
        _choice("data set", [self.dataset], DATASETS)
        _choice("model", [self.model], zoo.names())
        _choice("norm", [self.norm], ["default", "batch", "group", "none"])
        _choice("partition", [self.partition], ["iid", "dirichlet"])
        _choice("backend", [self.backend], backend_names())
        if not self.algorithm or not self.seeds:
            raise FLError("give at least one --algorithm and one of --seeds")
        if len(set(self.algorithm)) < len(self.algorithm) or len(set(self.seeds)) < len(self.seeds):
            raise FLError("--algorithm and --seeds name each method and seed once")
        least = {
            "clients": 1, "rounds": 1, "local_epochs": 1, "batch_size": 1, "min_samples": 1, "eval_every": 1,
            "checkpoint_every": 1, "models_every": 0, "momentum": 0, "weight_decay": 0,
        }  # fmt: skip
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise FLError(f"--{name.replace('_', '-')} must be {bound} or more, got {getattr(self, name)}")
        if not self.lr > 0:
            raise FLError(f"--lr must be above 0, got {self.lr}")
        if min(self.seeds) < 0:
            raise FLError(f"--seeds must be 0 or more, got {min(self.seeds)}")
        self.cohort()

    def cohort(self) -> int:
        """K, the number of participants of a round."""
        share = isinstance(self.participants, float)
        if share and not 0 < self.participants <= 1:
            raise FLError(
                f"--participants {self.participants} is neither a count (without decimal point) nor a share in (0, 1]"
            )
        k = max(1, round(self.participants * self.clients)) if share else int(self.participants)
        if not 1 <= k <= self.clients:
            raise FLError(f"--participants {k} of --clients {self.clients}: a round needs between 1 and all of them")
        return k

    def runs(self) -> list["Config"]:
        """One config for each method and seed."""
        return [replace(self, algorithm=(a,), seeds=(s,)) for a in self.algorithm for s in self.seeds]

    def title(self) -> str:
        """A short name made from the settings.

        >>> Config(seeds=(0, 1)).title()
        'fedmr-digits-cnn-dirichlet0.5-seed0,1'
        """
        spread = f"dirichlet{self.alpha:g}" if self.partition == "dirichlet" else self.partition
        seeds = ",".join(map(str, self.seeds))
        return f"{','.join(self.algorithm)}-{self.dataset}-{self.model}-{spread}-seed{seeds}"

    def to_yaml(self) -> str:
        """The settings as YAML; `from_yaml` is the inverse. `resume` is no setting and left out."""
        values = dataclasses.asdict(replace(self, resume=None))
        del values["resume"]
        values |= {name: list(values[name]) for name in ("algorithm", "seeds")}
        return yaml.safe_dump(values, sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> "Config":
        """The settings from YAML; what it leaves out has its default.

        >>> Config.from_yaml(Config(lr=0.5).to_yaml()) == Config(lr=0.5)
        True
        """
        values = yaml.safe_load(text)
        nested = {"fedprox": FedProxOptions, "fedmr": FedMROptions}
        try:
            values |= {name: make(**values[name]) for name, make in nested.items() if name in values}
            values |= {name: tuple(values[name]) for name in ("algorithm", "seeds") if name in values}
            return cls(**values)
        except TypeError as error:
            raise FLError(f"not the settings of a run: {error}") from None

    @classmethod
    def read(cls, folder: Path) -> "Config":
        """The settings of a run folder."""
        try:
            return cls.from_yaml((folder / "config.yaml").read_text())
        except OSError:
            raise FLError(f"{folder} is no run folder: it has no config.yaml") from None


def _choice(what: str, values, valid) -> None:
    for value in values:
        if value not in valid:
            raise FLError(f"unknown {what} {value!r}: there are {', '.join(valid)}")
