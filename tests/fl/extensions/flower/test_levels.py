"""FeMAM on real clients: a node has its own pathway, only what it lacks travels, and new clients join."""

import json

import pytest
import torch
from fl_nodes import Direct, dealt, deployed, same, settings, simulated, tensors
from refusals import fl_refused
from safetensors.torch import load_file

import fl
from fl.algorithms.femam import FeMAMOptions
from fl.extensions.flower.folders import read_node
from fl.extensions.flower.nodes import Timeouts
from fl.extensions.flower.remote import serve

LEVELS = FeMAMOptions(levels=("global", "2", "personal"), level_rounds=(2, 2))


def config(options=LEVELS, **changes):
    return settings("femam", **{"rounds": 6, "samples": 200, "local_valid": 0.1, "femam": options, **changes})


def personal(folder):
    return load_file(sorted(folder.glob("*/*-*.safetensors"))[-1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("femam")
    _, link = deployed(config(), root)
    return root, link.requests


@pytest.mark.slow
def test_levels__are_those_of_the_simulator(trained, tmp_path):
    root, _ = trained
    there, here = tensors(root / "remote"), simulated(config(), tmp_path)
    assert same(*({name: t for name, t in each.items() if not name.startswith("clients/")} for each in (there, here)))
    version = there["clients/version"]
    assert version.any()
    for client in version.nonzero().flatten().tolist():
        mine = personal(root / "data" / f"kept-{client}")
        assert all(torch.equal(mine[name], here[f"clients/{name}"][client]) for name in mine)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        FeMAMOptions(levels=("global", "2", "personal"), level_rounds=(2, 2), combine="mean", share_gradients=True),
        FeMAMOptions(levels=("global", "2"), window=2, variance=100.0),  # which converges
        FeMAMOptions(levels=("2", "personal"), level_rounds=(3,), start="global", prune=False),
        FeMAMOptions(levels=("personal",)),
    ],
)
def test_levels__so_they_are_with_other_options(options, tmp_path):
    there, here = deployed(config(options), tmp_path)[0], simulated(config(options), tmp_path)
    left = "clients/" if options.levels[-1] == "personal" else "nothing"
    left = (left, "global/") if options.levels == ("personal",) else left  # no server knows the mean of all
    assert same(*({name: t for name, t in each.items() if not name.startswith(left)} for each in (there, here)))


@pytest.mark.slow
def test_levels__a_finished_level_travels_once_to_each_client_and_a_personal_one_never(trained):
    root, requests = trained
    came = {}
    for request in requests:
        if request.header["kind"] in ("update", "judge"):
            for number, digest in enumerate(request.header["levels"]):
                if any(name.startswith(f"level{number}/") for name in request.tensors):
                    key = request.header["client"], digest
                    came[key] = came.get(key, 0) + 1
    assert set(came.values()) == {1}
    third = [
        request for request in requests if request.header["kind"] == "update" and len(request.header["levels"]) == 2
    ]
    assert third
    assert not any(name.startswith("message/") for request in third for name in request.tensors)
    files = list((root / "data").glob("kept-*/levels/*.safetensors"))
    assert {path.stem for path in files} <= {digest for _, digest in came}


@pytest.mark.slow
def test_levels__a_node_whose_disk_was_lost_gets_its_levels_again(tmp_path):
    options = FeMAMOptions(levels=("global", "2"), level_rounds=(1,), prune=False)
    nodes, test = dealt(config(options), tmp_path / "data")

    def burgle(round):
        for node in nodes if round == 4 else ():
            node.__post_init__()  # started anew
            for path in node.folder.glob("levels/*"):
                path.unlink()

    link, wanted = Direct(nodes, before=burgle), config(options, clients=4, participants=4)
    with fl_refused("peers", "--quorum"):
        serve(link, wanted, tmp_path / "run", test, Timeouts(start=0, nodes=4))
    serve(link, wanted, tmp_path / "run", test, Timeouts(start=0, nodes=4))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 6


@pytest.mark.slow
def test_levels__a_client_that_does_not_answer_keeps_the_pathway_that_it_has(tmp_path):
    """At the end of the second level client 1 is not asked: it stays in its cluster."""
    options = FeMAMOptions(levels=("global", "2", "personal"), level_rounds=(1, 1), min_gain=100.0)  # all others leave
    nodes, test = dealt(config(options), tmp_path / "data")
    mute = lambda client, round, answer: "" if client == 1 and answer.header["kind"] == "judge" else answer  # noqa: E731
    wanted = config(options, rounds=2, participants=4)
    serve(Direct(nodes, mute), wanted, tmp_path / "run", test, Timeouts(start=0, nodes=4))
    assert (tensors(tmp_path / "run")["structure/pathways"][1] >= 0).tolist() == [False, True, False, False]


def test_levels__a_new_client_joins_with_what_the_server_has(trained, tmp_path):
    root, _ = trained
    fl.Pathways.load(root / "remote").save(tmp_path / "levels.safetensors")  # which the new node is given
    paths = fl.Pathways.load(tmp_path / "levels.safetensors")
    assert paths.kinds == ("global", "2")
    data, split = read_node(root / "data" / "node-0")
    x, y = data.normalise(data.x[split.train]), data.y[split.train]
    new = paths.join(x, y)
    assert (new, paths.pathway(new)[0]) == (4, 0)
    assert paths.predict(new, x).shape == (len(y), 10)
