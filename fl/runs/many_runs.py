"""Several runs, one after another, each in its folder; among them the same ones for several values of an option."""

import difflib
import io
import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

import tyro
import yaml

from fl import data
from fl.base.console import program
from fl.base.errors import Diverged, FLError
from fl.base.files import write_text
from fl.base.settings import check_read, check_values, choice, settings_of
from fl.distributed import current
from fl.runs.folder import run_name
from fl.runs.lock import SETTINGS, is_unused, open_run_folder
from fl.runs.logs import require
from fl.runs.one_run import simulate
from fl.runs.run import Run
from fl.settings import Config
from fl.settings.config import check_renamed, flat

SWEEP = "sweep.yaml"
_log = logging.getLogger("fl")


@contextmanager
def resumable(folder: Path, command: str) -> Iterator[None]:
    """On Ctrl-C or SIGTERM inside this block, say where the results are and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        if not is_unused(folder):
            where = shlex.quote(str(folder))
            print(f"\nstopped; results so far are in {where}\ncontinue with:  {program(command)} --resume {where}")
        raise


@dataclass(frozen=True)
class Ended:
    """Outcome of several runs.

    Attributes:
        done: the folders of those that did all their rounds.
        failed: why training failed: of runs that diverged, which are not among `done`, and of those that ended with a
            loss that is not finite, which are.
    """

    done: list[Path] = field(default_factory=list)
    failed: dict[Path, str] = field(default_factory=dict)

    def describe(self) -> str:
        """List the runs that failed, a line for each.

        >>> print(Ended([], {Path("a"): "the loss is nan in round 4"}).describe())
        <BLANKLINE>
        training has failed in 1 of the runs:
        a: the loss is nan in round 4
        """
        if not self.failed:
            return ""
        lines = [f"{path}: {why}" for path, why in self.failed.items()]
        return "\n".join([f"\ntraining has failed in {len(lines)} of the runs:", *lines])


def train_all(
    runs: Mapping[Path, Config], settings: Path, text: str, resume: bool, load: Callable[[Config], data.Dataset]
) -> Ended:
    """Carry out several runs, each in its folder.

    Finished runs are kept, interrupted ones are resumed; after a run whose training fails the others go on.

    Args:
        runs: the settings (with one method and one seed) of the run in each folder.
        settings: the file that describes all of them, in the folder above theirs, which must be new unless `resume`.
        text: the content of that file.
        load: loads the data set of a run.

    Raises:
        FLError: as `simulate` does, and if all runs diverge.
    """
    ended, writes = Ended(), current().rank == 0
    with open_run_folder(settings.parent, resume) if writes else nullcontext():
        for path, one in runs.items() if writes else ():  # an error in the last must come before the first trains
            require(one.log)
            dataset = load(one)
            with _quiet():  # it is built again, and warns, when its turn comes: all together may not fit into memory
                Run.prepare(one, path, True, dataset)
        if writes:
            _tell_renamed(settings.parent, runs)
            write_text(settings, text)
        for path, one in runs.items():
            try:
                there, placed = path.exists(), replace(one, out=str(path.parent), name=path.name)
                summary = simulate(placed, path, resume=there, dataset=load(one))
                ended.done.append(path)
                if "failed" in summary:
                    ended.failed[path] = summary["failed"]
            except Diverged as error:
                if path == [*runs][-1] and not ended.done:
                    raise
                _log.warning("warning: %s is left out: %s", path, error)
                ended.failed[path] = str(error)
    return ended


@contextmanager
def _quiet() -> Iterator[None]:
    """Log no warnings within the block."""
    before = _log.level
    _log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _log.setLevel(before)


def _tell_renamed(folder: Path, runs: Iterable[Path]) -> None:
    """Warn of runs that are trained anew beside others in the same folder that are none of these, but may have been."""
    new = [path for path in runs if not path.exists()]
    others = sorted({file.parent for file in folder.rglob(SETTINGS)} - {folder, *runs})
    if new and others:
        _log.warning(
            "warning: %s is trained anew, and %s is left alone: if it was renamed, stop here and give it its name back",
            ", ".join(path.name for path in new),
            ", ".join(map(str, others)),
        )


@dataclass(frozen=True)
class Sweep:
    """An option (a flag without its dashes), its values as they were written, and all other settings."""

    option: str
    values: tuple[str, ...]
    config: Config

    @classmethod
    def make(cls, option: str, values: str, config: Config) -> "Sweep":
        """Split and check what was written on the command line.

        >>> Sweep.make("participants", "5,10", Config()).values
        ('5', '10')
        """
        option = option.replace("_", "-")
        several = isinstance(flat(asdict(Config())).get(option), tuple) and "/" in values
        sweep = cls(option, tuple(text.strip() for text in values.split("/" if several else ",")), config)
        sweep.check()
        return sweep

    def check(self) -> None:
        """Raise FLError for an unknown option, one that cannot be swept, and values that it cannot have."""
        option = self.option
        settings = {setting.flag: setting for setting in settings_of(self.config)}
        if option in settings and not settings[option].role.compared:
            several = option in ("algorithm", "seeds")
            raise FLError(
                f"{option} is not swept: "
                + (
                    f"give several as --{option} A,B,..."
                    if several
                    else f"results do not depend on it; give --{option}"
                )
            )
        if option not in settings:
            check_renamed([option])
            near = difflib.get_close_matches(option, settings, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise FLError(f"unknown option {option!r}: {hint}python -m fl.sweep --help lists all that can be swept")
        if len(self.values) < 2:
            raise FLError(f"{option} {self.values[0]}: give at least two values, or run this one with fl.run")
        check_read(self.config, [option])
        configs = [self.at(text) for text in self.values]
        if option == "local-valid":
            for config in configs:
                config.holding_out(chosen=True)
        for k, one in enumerate(configs):
            if one in configs[:k]:
                raise FLError(f"{option} {','.join(self.values)}: {self.values[k]} is there twice: give it once")

    def at(self, text: str) -> Config:
        """Set the option to one value; FLError where the flag does not take it."""
        group, _, name = self.option.rpartition(".")
        if isinstance(flat(asdict(self.config))[self.option], bool):
            choice(f"value of {self.option}", [text], ("true", "false"))
            prefix = f"{group}." if group else ""
            flags = [f"--{prefix}{'' if text == 'true' else 'no-'}{name}"]
        else:
            flags = [f"--{self.option}={text}"]
        said = io.StringIO()
        try:
            with redirect_stdout(said), redirect_stderr(said):
                config = tyro.cli(Config, args=flags, default=self.config)
        except SystemExit:
            kind = type(flat(asdict(self.config))[self.option]).__name__
            what = {"int": "a whole number", "float": "a number", "tuple": "numbers"}.get(kind, "such a value")
            raise FLError(f"{self.option} cannot be {text!r}: --{self.option} takes {what}") from None
        check_values(config)
        return config

    def methods(self) -> tuple[list[str], list[str]]:
        """Split the methods: (those that read the option, the others)."""
        each = {name: replace(self.config, algorithm=(name,)).settings() for name in self.config.algorithm}
        reads = [name for name, settings in each.items() if self.option in {setting.flag for setting in settings}]
        return reads, [m for m in self.config.algorithm if m not in reads]

    def runs(self, folder: Path) -> dict[tuple[str, str], dict[Path, Config]]:
        """Map (value, method) to run folders and their settings; the value of a method that does not read the option is
        "".
        """
        reads, others = self.methods()
        result = {}
        for text in self.values:
            for method in reads:
                within = folder / f"{self.option}={quote(text, safe=',')}"
                runs = replace(self.at(text), algorithm=(method,)).runs()
                result[text, method] = {within / run_name(one): one for one in runs}
        for method in others:
            runs = replace(self.config, algorithm=(method,)).runs()
            result["", method] = {folder / run_name(one): one for one in runs}
        return result

    def write(self) -> str:
        """Write the sweep as YAML; `read` is the inverse."""
        settings = yaml.safe_load(self.config.to_yaml(swept=self.option))
        return yaml.safe_dump(
            {"option": self.option, "values": list(self.values), "settings": settings}, sort_keys=False
        )

    @classmethod
    def read(cls, folder: Path) -> "Sweep":
        """Read the sweep of a folder; FLError if it holds none."""
        path = folder / SWEEP
        try:
            saved = yaml.safe_load(path.read_text())
            option, values, settings = saved["option"], tuple(map(str, saved["values"])), saved["settings"]
        except (OSError, UnicodeDecodeError):
            way = f"; it holds a run: `python -m fl.run --resume {folder}`" * (folder / "config.yaml").is_file()
            raise FLError(f"{folder} is not the folder of a sweep: it has no {SWEEP} that can be read{way}") from None
        except (yaml.YAMLError, KeyError, TypeError):
            raise FLError(f"{path} is not a sweep: put back the file that fl.sweep wrote") from None
        try:
            sweep = cls(option, values, Config.from_yaml(yaml.safe_dump(settings)))
            sweep.check()
        except FLError as error:
            raise FLError(f"{path}: {error}") from None
        return sweep
