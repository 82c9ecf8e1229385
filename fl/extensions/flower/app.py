"""The ServerApp and the ClientApp of `flwr run`.

`fl.extensions.flower.local.write_app` writes its folder. The run config has the keys of `RunSettings`. A node's config
has `partition-id`, and may have `data` (its folder), `init` (its copy of the weights that adapters are beside) and
`width` and `depth`, or `budget`.
"""

import dataclasses
import shlex
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fl.base.errors import FLError
from fl.extensions.flower.flower import FlowerMessage, Grid, GridLink, reply_to
from fl.extensions.flower.folders import SERVER, node_folder, read_node, read_server
from fl.extensions.flower.node import Node
from fl.extensions.flower.nodes import Timeouts
from fl.extensions.flower.remote import serve
from fl.runs.summary import describe
from fl.settings.command_line import parse

Context: TypeAlias = Any
"""`flwr.app.Context`."""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The settings of a run on real clients beside the settings of training.

    These are the keys of Flower's run config, with dashes for underscores.

    >>> RunSettings.of({"round-timeout": 30}).round_timeout
    30
    """

    flags: str = ""
    """the settings of training, as on the command line of `run`"""
    folder: str = "runs/flower"
    """the run folder, on the server; a run that is in it already is resumed"""
    data: str = "data"
    """the folder with the data folders of server and nodes, for machines that have no other"""
    server_data: str = ""
    """the server's data folder [data/server]"""
    nodes: int = 1
    """nodes of the run, numbered from 0 on, which have to be there before the first round"""
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
        for field in dataclasses.fields(cls):
            key = field.name.replace("_", "-")
            if key not in config:
                continue
            value = values[field.name] = config[key]
            number = type(field.default) in (int, float)
            if isinstance(value, bool) or not isinstance(value, (int, float) if number else str):
                raise FLError(f"the run config's {key} is {value!r}: give a {type(field.default).__name__}")
            if number and value < 0:
                raise FLError(f"the run config's {key} is {value}: give 0 or more")
        return cls(**values)


def server_app() -> Any:
    """Return the `flwr.serverapp.ServerApp` that trains and leaves a run folder."""
    from flwr.serverapp import ServerApp

    app = ServerApp()
    app.main()(_train)
    return app


def client_app() -> Any:
    """Return the `flwr.clientapp.ClientApp` of a node."""
    from flwr.clientapp import ClientApp

    app = ClientApp()
    app.train()(_answer)
    app.query()(_answer)
    return app


def _train(grid: Grid, context: Context) -> None:
    settings = RunSettings.of(context.run_config)
    try:
        config = parse(shlex.split(settings.flags)).one_run()
        waiting = Timeouts(settings.round_timeout, settings.quorum, settings.nodes, settings.start_timeout)
        test = read_server(Path(settings.server_data or Path(settings.data, SERVER)))
        summary = serve(GridLink(grid), config, Path(settings.folder), test, waiting)
        print(describe(summary), flush=True)
    except FLError as error:
        print(f"error: {error}", flush=True)
        raise


def _answer(message: FlowerMessage, context: Context) -> FlowerMessage:
    return reply_to(message, lambda request: _node_of(context).answer(request))


def _node_of(context: Context) -> Node:
    settings, config = RunSettings.of(context.run_config), context.node_config
    if "partition-id" not in config:
        raise FLError("the node's config has no partition-id: give --node-config 'partition-id=0' (1, 2, ...)")
    number = int(config["partition-id"])
    folder = Path(str(config["data"])) if "data" in config else node_folder(Path(settings.data), number)
    budget = {name: _numbers(config[name]) for name in ("width", "depth", "budget") if name in config}
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    return _node(number, folder, tuple(budget.items()), str(config["init"]) if "init" in config else None)


@lru_cache(maxsize=64)  # of the nodes that Flower simulates in one process
def _node(number: int, folder: Path, budget: tuple, init: str | None) -> Node:
    data, split = read_node(folder)
    return Node(number, data, split, dict(budget), folder / "kept", init)


def _numbers(value: object) -> object:
    """Return a width or a depth: a number, or several as text, such as "1-2-2"."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(float(part) if "." in part else int(part) for part in value.split("-"))
    except ValueError:
        raise FLError(f"a node's width or depth is a number, or several as 1-2-2, got {value!r}") from None
