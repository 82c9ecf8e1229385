"""100 rounds with 8 nodes and a fault in every fifth message: a run ends as if those clients had been absent."""

import random
from pathlib import Path

import pytest
import torch
from fl_nodes import FAULTS, Direct, dealt, same, settings, tensors

from fl.extensions.flower.nodes import Timeouts
from fl.extensions.flower.remote import serve

SHARE = 0.2


def faulty(client, round, answer):
    """One of the faults for a fifth of the requests, the same ones in every run."""
    draw = random.Random(f"{client} {round}")
    if not round or draw.random() >= SHARE:
        return answer
    spoil, _ = FAULTS[draw.choice(list(FAULTS))]
    return spoil(answer)


def absent(client, round, answer):
    return "no answer" if faulty(client, round, answer) is not answer else answer


@pytest.mark.nightly
def test_soak__faults_change_nothing_but_who_takes_part(tmp_path):
    config = settings(
        "fedavg", clients=8, participants=8, rounds=100, eval_every=50, checkpoint_every=50, partition="iid"
    )
    nodes, test = dealt(config, tmp_path / "data")
    waiting = Timeouts(start=0, nodes=8)
    sizes = []

    def measure(round):
        link.requests.clear()
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)  # resident bytes

    link = Direct(nodes, faulty, after=measure)
    with_faults = serve(link, config, tmp_path / "faults", test, waiting)
    without = serve(Direct(nodes, absent), config, tmp_path / "absent", test, waiting)
    assert with_faults["rounds"] == 100
    assert with_faults["final"]["accuracy"] == without["final"]["accuracy"]
    assert same(tensors(tmp_path / "faults"), tensors(tmp_path / "absent"))
    grown = torch.tensor(sizes[-10:]).float().mean() - torch.tensor(sizes[30:40]).float().mean()
    assert grown < 6 * 2**20, f"server and nodes grew by {grown:,.0f} bytes in 60 rounds"
