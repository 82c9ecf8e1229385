"""Flower with its simulation engine: Ray actors that train the clients, messages between them and the server."""

import functools
import json
from importlib import metadata

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from sides.worker import Job, Link, client_data, make_model, prepare

FOREVER = 10**9


class InTurns(FedAvg):
    """Flower's FedAvg, which waits for the driver before each round."""

    def __init__(self, link: Link, **arguments) -> None:
        super().__init__(**arguments)
        self.link = link

    def configure_train(self, server_round, arrays, config, grid):
        self.arrays = arrays
        self.link.begin()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        if failed := [reply.error.reason for reply in replies if reply.has_error()]:
            raise RuntimeError(f"{len(failed)} clients failed: {failed[0]}")
        aggregated = super().aggregate_train(server_round, replies)
        self.link.end()
        return aggregated


def run(job: Job, link: Link) -> None:
    """Serve rounds until the driver stops."""
    server_app, client_app = ServerApp(), ClientApp()
    client_app.train()(train)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = InTurns(
            link,
            fraction_train=job.participants / job.clients,
            fraction_evaluate=0.0,
            min_train_nodes=job.participants,
            min_available_nodes=job.clients,
        )
        threads = f"{job.actors} Ray actors, 1 CPU and 1 torch thread each"
        link.ready("flwr", metadata.version("flwr"), threads, lambda: strategy.arrays.to_torch_state_dict())
        config = ConfigRecord({"job": json.dumps(vars(job))})
        strategy.start(grid, ArrayRecord(make_model(job).state_dict()), FOREVER, train_config=config)

    gpus = 1 / job.actors if job.device == "cuda" else 0.0
    run_simulation(
        server_app,
        client_app,
        num_supernodes=job.clients,
        backend_config={
            "init_args": {"num_cpus": job.actors, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": gpus},
        },
    )


@functools.lru_cache(maxsize=1)
def workplace(text: str):
    """What an actor keeps from client to client: the job, the model and all clients' data, on its device or mapped."""
    job = Job(**json.loads(text))
    prepare(1)
    return job, make_model(job).to(job.device), client_data(job, job.device)


def train(message: Message, context: Context) -> Message:
    """One client's local training."""
    job, model, data = workplace(message.content["config"]["job"])
    x, y = data[context.node_config["partition-id"]]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), job.lr, job.momentum)
    for _ in range(job.epochs):
        order = torch.arange(len(y)) if job.check else torch.randperm(len(y))
        for batch in order.to(job.device).split(job.batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    reply = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(reply), reply_to=message)
