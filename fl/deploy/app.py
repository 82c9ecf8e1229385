"""The ServerApp and the ClientApp of `flwr run`. `fl.deploy.local.write_app` writes the folder that it is given.

The run config has the keys of `fl.deploy.settings.RunSettings`. A node's config has `partition-id`, and may have `data`
(its folder) and `width` and `depth`, or `budget`.
"""

import shlex
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fl.base.errors import FLError
from fl.deploy.flower import Grid, GridLink, Message, answered
from fl.deploy.folders import SERVER, node_folder, read_node, read_server
from fl.deploy.node import Node
from fl.deploy.nodes import Waiting
from fl.deploy.serve import serve
from fl.deploy.settings import RunSettings
from fl.runs.summary import describe
from fl.settings.command_line import parse

Context: TypeAlias = Any
"""`flwr.app.Context`."""


def server_app() -> Any:
    """The `flwr.serverapp.ServerApp` that trains with the nodes, and leaves a run folder."""
    from flwr.serverapp import ServerApp

    app = ServerApp()
    app.main()(_server)
    return app


def client_app() -> Any:
    """The `flwr.clientapp.ClientApp` of a node."""
    from flwr.clientapp import ClientApp

    app = ClientApp()
    app.train()(_answer)
    app.query()(_answer)
    return app


def _server(grid: Grid, context: Context) -> None:
    settings = RunSettings.of(context.run_config)
    try:
        config, _ = parse(shlex.split(settings.flags))
        waiting = Waiting(settings.round_timeout, settings.quorum, settings.nodes, settings.start_timeout)
        test = read_server(Path(settings.server_data or Path(settings.data, SERVER)))
        summary = serve(GridLink(grid), config, Path(settings.folder), test, waiting)
        print(describe(summary), flush=True)
    except FLError as error:
        print(f"error: {error}", flush=True)
        raise


def _answer(message: Message, context: Context) -> Message:
    return answered(message, lambda request: _of(context).answer(request))


def _of(context: Context) -> Node:
    settings, mine = RunSettings.of(context.run_config), context.node_config
    if "partition-id" not in mine:
        raise FLError("the node's config has no partition-id: give --node-config 'partition-id=0' (1, 2, ...)")
    number = int(mine["partition-id"])
    folder = Path(str(mine["data"])) if "data" in mine else node_folder(Path(settings.data), number)
    budget = {name: _numbers(mine[name]) for name in ("width", "depth", "budget") if name in mine}
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    return _node(number, folder, tuple(budget.items()))


@lru_cache(maxsize=64)  # of the nodes that Flower simulates in one process
def _node(number: int, folder: Path, budget: tuple) -> Node:
    data, split = read_node(folder)
    return Node(number, data, split, dict(budget), folder / "kept")


def _numbers(value: object) -> object:
    """A width or a depth: a number, or several as text, such as "1-2-2"."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(float(part) if "." in part else int(part) for part in value.split("-"))
    except ValueError:
        raise FLError(f"a node's width or depth is a number, or several as 1-2-2, got {value!r}") from None
