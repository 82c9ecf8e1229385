"""The same runs for several values of one option."""

import difflib
import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import quote

import tyro
import yaml

from fl.base.errors import FLError
from fl.base.settings import check_read, check_values, choice, settings_of
from fl.config import Config
from fl.config.config import flat
from fl.runs.folder import run_name

FILE = "sweep.yaml"


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
        """The settings with one value; FLError where the flag does not take it."""
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
        """(methods that read the option, methods that do not)."""
        each = {name: replace(self.config, algorithm=(name,)).settings() for name in self.config.algorithm}
        reads = [name for name, settings in each.items() if self.option in {setting.flag for setting in settings}]
        return reads, [m for m in self.config.algorithm if m not in reads]

    def runs(self, folder: Path) -> dict[tuple[str, str], dict[Path, Config]]:
        """(value, method) -> run folder -> settings; the value of a method that does not read the option is ""."""
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
        """As YAML; `read` is the inverse."""
        settings = yaml.safe_load(self.config.to_yaml(swept=self.option))
        return yaml.safe_dump(
            {"option": self.option, "values": list(self.values), "settings": settings}, sort_keys=False
        )

    @classmethod
    def read(cls, folder: Path) -> "Sweep":
        """The sweep of a folder; FLError if it holds none."""
        path = folder / FILE
        try:
            saved = yaml.safe_load(path.read_text())
            option, values, settings = saved["option"], tuple(map(str, saved["values"])), saved["settings"]
        except (OSError, UnicodeDecodeError):
            way = f"; it holds a run: `python -m fl.run --resume {folder}`" * (folder / "config.yaml").is_file()
            raise FLError(f"{folder} is not the folder of a sweep: it has no {FILE} that can be read{way}") from None
        except (yaml.YAMLError, KeyError, TypeError):
            raise FLError(f"{path} is not a sweep: put back the file that fl.sweep wrote") from None
        try:
            sweep = cls(option, values, Config.from_yaml(yaml.safe_dump(settings)))
            sweep.check()
        except FLError as error:
            raise FLError(f"{path}: {error}") from None
        return sweep
