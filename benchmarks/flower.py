"""Time and bytes of a round on Flower: in its simulation and in a deployment, beside the simulator of this project.

    python benchmarks/flower.py               # prints the table, writes benchmarks/results/flower.json
    python benchmarks/flower.py --quick       # a few rounds of few clients, to see that it runs

FedAvg of the digits, all clients in every round. `simulator` is `fl.simulate`; `simulation` and `deployment` are the
same run on Flower's simulation (Ray) and on a SuperLink and SuperNodes with TLS and node authentication, each a process
of its own on this machine; `flower's simulation` and `flower's deployment` are Flower's own FedAvg strategy on the same
data, model, epochs and batch size, with a plain PyTorch loop as its ClientApp. Times are between the ends of rounds, as
the server sees them; the first round is left out, since it also starts processes. Bytes are those of the tensors of one
client's model, down and up. Needs the extra `flower`.
"""

import argparse
import csv
import json
import shlex
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from report import write

import fl
from fl.extensions.flower import local
from fl.extensions.flower.folders import deal_out

THEIRS = '''"""FedAvg as Flower's users write it."""

import json
import time
from pathlib import Path

import torch
import zoo
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from fl.extensions.flower.folders import node_folder, read_node

client = ClientApp()
server = ServerApp()


def model(config):
    spec = zoo.Spec("cnn", 10, 1, 8, width=config["width"])
    return spec.build(torch.Generator().manual_seed(0))


@client.train()
def train(message, context):
    config = context.run_config
    torch.set_num_threads(config["threads"])
    data, split = read_node(node_folder(Path(config["data"]), int(context.node_config["partition-id"])))
    net = model(config)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    for _ in range(config["epochs"]):
        for index in torch.randperm(len(split.train)).split(10):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(data.normalise(data.x[index])), data.y[index])
            loss.backward()
            optimizer.step()
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(split.train)})}
    return Message(RecordDict(content), reply_to=message)


@server.main()
def main(grid, context):
    config, ends = context.run_config, []

    def ended(number, arrays):
        ends.append(time.time())
        Path(config["folder"]).write_text(json.dumps(ends))

    nodes = config["nodes"]
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    strategy.start(grid, ArrayRecord(model(config).state_dict()), config["rounds"], evaluate_fn=ended)
'''


def ours(root: Path) -> list[float]:
    """Return the seconds between the ends of rounds, of a run folder."""
    with open(root / "run" / "metrics.csv", newline="") as opened:
        return [float(row["seconds"]) for row in csv.DictReader(opened)][1:]


def theirs(root: Path) -> list[float]:
    """Return the same, of Flower's own strategy, which calls back before the first round and after each."""
    ends = json.loads((root / "ends.json").read_text())
    return [after - before for before, after in pairwise(ends[1:])]


def on_flower(root: Path, config: fl.Config, how: str, own: bool, timeout: float) -> list[float]:
    """Return the seconds of rounds on Flower; `how` is "simulation" (Ray) or "deployment"."""
    root.mkdir()
    deal_out(config, root / "data")
    values = {"data": str(root / "data"), "nodes": config.clients.number, "threads": 1}
    if own:
        flags = f"--algorithm fedavg --participants {config.clients.participants} --rounds {config.rounds} "
        flags += f"--width {config.model.width[0]} --local-epochs {config.local.epochs} --eval-every {config.rounds}"
        times = {"round-timeout": timeout, "start-timeout": timeout}
        local.write_app(
            root / "app", values | {"flags": shlex.join(shlex.split(flags)), "folder": str(root / "run"), **times}
        )
    else:
        more = {"rounds": config.rounds, "epochs": config.local.epochs, "width": config.model.width[0]}
        local.write_app(root / "app", values | {"folder": str(root / "ends.json"), **more})
        (root / "app" / "surgery_app.py").write_text(THEIRS)
    words = ("--federation-config", f"num-supernodes={config.clients.number}") if how == "simulation" else ()
    nodes = local.processes(root, "insecure = true") if words else local.deployment(root, config.clients.number)
    with nodes as running:
        if words:
            running.start_superlink("--insecure", "--simulation")
        status = running.wait(running.run(root / "app", *words), timeout * config.rounds)
    if status != "finished:completed":
        raise RuntimeError(f"{how} ended as {status}: see {root / 'superlink.log'}")
    return ours(root) if own else theirs(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a round may take")
    parser.add_argument("--quick", action="store_true", help="few and short rounds, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rounds, epochs = (3, 1) if options.quick else (options.rounds, options.epochs)
    config = fl.Config.of(
        algorithm="fedavg",
        clients=options.clients,
        participants=options.clients,
        rounds=rounds,
        local_epochs=epochs,
        width=0.1 if options.quick else 0.5,
        eval_every=rounds,
    )
    sides: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "here").mkdir()
        begun = time.time()
        summary = fl.simulate(config, root / "here" / "run")
        sides["simulator"] = ours(root / "here")
        for how in ("simulation", "deployment"):
            for own in (True, False):
                name = how if own else f"flower's {how}"
                sides[name] = on_flower(root / f"{how}-{own}", config, how, own, options.timeout)
                print(f"{name}: {statistics.median(sides[name]):.3f} s a round", flush=True)
    print(f"\n{'side':24}{'s a round':>10}{'from':>8}{'to':>8}{'x simulator':>13}")
    base = statistics.median(sides["simulator"])
    for name, each in sides.items():
        middle = statistics.median(each)
        print(f"{name:24}{middle:10.3f}{min(each):8.3f}{max(each):8.3f}{middle / base:13.1f}")
    traffic = {name: summary["final"][name] for name in ("bytes_down", "bytes_up")}
    print(f"a client receives {traffic['bytes_down']:,.0f} bytes a round and sends {traffic['bytes_up']:,.0f}")
    settings = {"clients": options.clients, "rounds": rounds, "epochs": epochs, "quick": options.quick}
    took = time.time() - begun
    write({"settings": settings, "seconds": sides, "traffic": traffic, "took": took}, options.out, "flower")


if __name__ == "__main__":
    main()
