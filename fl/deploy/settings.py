"""What a run on real clients is told beside the settings of training: Flower's run config."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fl.base.errors import FLError


@dataclass(frozen=True)
class RunSettings:
    """The keys of the run config, with dashes for underscores.

    >>> RunSettings.of({"round-timeout": 30}).round_timeout
    30
    """

    flags: str = ""
    """the settings of training, as on the command line of `run`"""
    folder: str = "runs/flower"
    """the run folder, on the server; a run that is in it already goes on"""
    data: str = "data"
    """the folder with the data folders of server and nodes, for machines that have no other"""
    server_data: str = ""
    """the server's data folder [data/server]"""
    nodes: int = 1
    """nodes that have to be there before the first round"""
    quorum: int = 1
    """clients of a round that have to answer; with fewer the run stops, and can be gone on with"""
    round_timeout: float = 600.0
    """seconds that the server waits for the answers of a round"""
    start_timeout: float = 120.0
    """seconds that the server waits for the nodes before the first round"""
    threads: int = 0
    """CPU threads of a node; 0: as many as PyTorch takes"""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "RunSettings":
        """From Flower's run config. Raises FLError for a value that a key cannot have."""
        values = {}
        for field in fields(cls):
            key = field.name.replace("_", "-")
            if key in config:
                value = config[key]
                number = type(field.default) in (int, float)
                if isinstance(value, bool) or not isinstance(value, (int, float) if number else str):
                    raise FLError(f"the run config's {key} is {value!r}: give a {type(field.default).__name__}")
                if number and value < 0:
                    raise FLError(f"the run config's {key} is {value}: give 0 or more")
                values[field.name] = value
        return cls(**values)
