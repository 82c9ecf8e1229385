"""The flags of `python -m fl.run`, flat: the settings, and options by name."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass, make_dataclass, replace
from typing import Annotated, Any, NamedTuple

import tyro

from fl.algorithms import ALGORITHMS, OPTIONS, methods_of
from fl.algorithms.method import KINDS as METHOD_KINDS
from fl.base.console import program
from fl.base.errors import FLError
from fl.base.settings import (
    About,
    Alternative,
    Flag,
    Rare,
    T,
    check_values,
    flag_in,
    flag_of,
    name_of,
    several,
)
from fl.partition import KINDS
from fl.settings.config import Config
from fl.settings.experiment import Experiment
from fl.settings.extensions import EXTENSIONS
from fl.settings.places import OWN, TOPICS, partition_named
from surgery import SurgeryError
from surgery.arguments import parse


def _about_methods() -> str:
    single, personal, different = (", ".join(methods_of(kind)) for kind in METHOD_KINDS)
    return (
        f"federated methods, comma-separated, your own as module:METHOD: one global model {single}; a personalized "
        f"model for each client {personal}; heterogeneous clients of different --architectures {different}. Several "
        "run on the same splits and are compared"
    )


@dataclass(frozen=True)
class Command:
    """The runs of a command, and their folder."""

    algorithm: Annotated[
        tuple[str, ...], several(str, "NAME,...", items=ALGORITHMS, own="METHOD"), About(_about_methods)
    ] = Experiment.algorithms
    seeds: Annotated[tuple[int, ...], several(int, "INT,...", least=0, below=2**32)] = (0,)
    """one run for each seed, which determines the split, the initial weights, the sampling and the batches"""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = "runs"
    """folder in which run folders are made"""
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """name of the run folder, which must be new [made from the settings]"""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """settings from a file, such as a run's config.yaml; flags override it"""
    resume: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """continue the run in this folder, with its settings; --rounds can be raised if --lr-schedule is constant or
    exponential and no client joins or leaves"""


class Entry(NamedTuple):
    """A flag, or a group of flags whose names begin with the group's.

    Attributes:
        field: of the dataclass `owner`, which documents it. default: its value, the options of a group.
    """

    owner: type | None
    field: Field
    default: Any

    @property
    def group(self) -> bool:
        """True if it is a group."""
        return is_dataclass(self.default)


def entries(methods: Iterable[str]) -> dict[str, dict[str, Entry]]:
    """List all settings that flags may give, by topic and name.

    The options of all partitions, of some methods and of extensions are among them.

    Args:
        methods: whose options are among them.
    """
    topics: dict[str, dict[str, Entry]] = {}
    for topic, kind in TOPICS.items():
        inside = topics.setdefault(topic, {})
        for setting in fields(kind):
            chosen = isinstance(setting.default, Alternative)
            inside[name_of(setting)] = Entry(kind, setting, setting.default.name if chosen else setting.default)
            for alternative in KINDS.values() if chosen else ():
                for option in fields(alternative.options) if alternative.options is not None else ():
                    inside.setdefault(option.name, Entry(type(alternative.options), option, option.default))
    topics["rounds"] = {
        setting.name: Entry(Config, setting, setting.default)
        for setting in fields(Config)
        if setting.name in OWN and setting.name != "seed"
    }
    topics["methods"] = {name: _group(name, OPTIONS[name]) for name in methods if OPTIONS.get(name) is not None}
    topics["extensions"] = {name: _group(name, extension.options, Rare()) for name, extension in EXTENSIONS.items()}
    return topics


def _group(name: str, options: Any, *notes: Any) -> Entry:
    holder = make_dataclass("Group", [(name, Annotated[type(options), "a group", *notes], field(default=options))])
    return Entry(None, fields(holder)[0], options)


def flags_class(topics: Mapping[str, Mapping[str, Entry]], base: type = Command) -> type:
    """Make the dataclass whose fields are these flags, after a base class's fields."""
    types = []
    for name, entry in ((name, entry) for inside in topics.values() for name, entry in inside.items()):
        kind = entry.field.type
        if isinstance(entry.field.default, Alternative):
            notes = [note for note in kind.__metadata__ if hasattr(note, "help")]
            kind = Annotated[str, Flag(str, "NAME", KINDS, own="KIND"), *notes]
        types.append(
            (name, kind, field(default=entry.default, metadata={"documented": (entry.owner, entry.field.name)}))
        )
    return make_dataclass("Flags", types, bases=(base,), namespace={"__doc__": base.__doc__}, frozen=True)


def parse_command_line(kind: type[T], argv: Sequence[str], prog: str) -> T:
    """Parse a command line with tyro; docstrings describe its flags.

    Raises FLError for what cannot be parsed. Comments at fields are not looked for, since tyro would read the source of
    nearly every class for them.

    Args:
        prog: how the command is called.
    """
    try:
        return parse(kind, argv, prog, config=(tyro.conf.HelptextFromCommentsOff,))
    except SurgeryError as error:
        raise FLError(str(error)) from None


def overridden(argv: Sequence[str], start: Experiment) -> tuple[Experiment, Any]:
    """Put a command line's flags into an experiment; return it with their values."""
    flags = {flag_in(word) for word in argv}
    algorithms = find_value(argv, "algorithm")
    methods = start.algorithms if algorithms is None else Experiment(algorithms=tuple(algorithms.split(","))).algorithms
    partition_named(find_value(argv, "partition"))  # before flags are made of the options of all partitions
    check_methods(flags, methods)
    values = parse_command_line(flags_class(entries(methods)), argv, program("run"))
    check_values(replace(values, algorithm=methods if algorithms else values.algorithm))
    top_level: dict[str, Any] = {"algorithms": methods}
    if "seeds" in flags:
        top_level["seeds"] = values.seeds
    changes = read_given(values, flags)
    if "participants" in changes and "participation" not in changes:  # a number overrides a share of the start
        changes["participation"] = 0.0
    return start.replace(**top_level, **changes), values


def read_given(values: Any, flags: Collection[str]) -> dict[str, Any]:
    """Return the settings that a command line gives, for `Config.of`.

    Of groups it is what the command line changes.

    Args:
        values: the values of all flags.
        flags: the flags on the command line.
    """
    selected: dict[str, Any] = {}
    command = {setting.name for setting in fields(Command)}
    for setting in fields(values):
        value = getattr(values, setting.name)
        if is_dataclass(value):
            inside = {f.name: getattr(value, f.name) for f in fields(value) if flag_of(f.name, setting.name) in flags}
            selected |= {setting.name: inside} if inside else {}
        elif flag_of(setting.name) in flags and setting.name not in command:
            selected[setting.name] = value
    return selected


def check_methods(flags: Iterable[str], methods: Collection[str]) -> None:
    """Raise FLError for a flag of a method that is not run."""
    for flag in flags:
        name = flag.partition(".")[0].replace("-", "_")
        if "." in flag and OPTIONS.get(name) is not None and name not in methods:
            raise FLError(
                f"--{flag} is for {name}, which is not in --algorithm {','.join(methods)}: leave it out, or add {name}"
            )


def find_value(argv: Iterable[str], flag: str) -> str | None:
    """Find a flag's value among the words of a command line without parsing it.

    The last value counts.
    """
    result, before = None, ""
    for word in argv:
        if before == flag:
            result = word
        name, equals, value = word.partition("=")
        if equals and flag_in(name) == flag:
            result = value
        before = "" if equals else flag_in(word)
    return result
