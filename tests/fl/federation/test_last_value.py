"""What is remembered is given back for the same tensors only, by the class itself and by all that use it."""

import copy
import pickle
from itertools import product

import pytest
import torch
from fleets import mixed
from rounds import made, play
from selection import some

from fl.federation.client_models import predict_all
from fl.federation.last_value import LastValue


def models():
    return {"a": torch.zeros(2), "b": torch.zeros(2)}


CHANGES = {
    "another tensor": lambda source: source["models"].update(a=torch.zeros(2)),
    "a write": lambda source: source["models"]["a"].add_(1),
    "a write to a view": lambda source: source["models"]["b"][:1].fill_(1),
    "swapped": lambda source: source["models"].update(a=source["models"]["b"], b=source["models"]["a"]),
    "renamed": lambda source: source["models"].update(c=source["models"].pop("b")),
    "one more": lambda source: source["models"].update(c=torch.zeros(2)),
    "one less": lambda source: source["models"].pop("b"),
    "another number": lambda source: source["used"].__setitem__(0, 5),
    "a tensor for a number": lambda source: source["used"].__setitem__(0, torch.tensor(1)),
    "a number for a tensor": lambda source: source["models"].update(a=0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changed_has_no_value(change):
    source, last = {"models": models(), "used": [1, -1]}, LastValue()
    assert last.of(source) is None
    assert last.keep(source, "value") == "value"
    assert last.of(source) == "value"
    assert last.of({"models": dict(source["models"]), "used": [1, -1]}) == "value"  # the same tensors
    CHANGES[change](source)
    assert last.of(source) is None


def test_only_the_last_value_is_kept_whatever_it_is():
    first, second, last = models(), models(), LastValue()
    last.keep(first, "first")
    last.keep(second, {})
    assert last.of(second) == {}
    assert last.of(first) is None
    assert last.of({name: tensor.clone() for name, tensor in second.items()}) is None


def test_a_tensor_at_the_address_of_another_one_is_another_one():
    last = LastValue()
    for _ in range(50):  # the ids of objects that are gone are given to new ones
        source = {"a": torch.zeros(2)}
        assert last.of(source) is None
        last.keep(source, "value")
        del source


def test_nothing_is_remembered_of_tensors_whose_writes_are_not_counted():
    last = LastValue()
    with torch.inference_mode():
        source = models()
        last.keep(models(), "before")
        assert last.keep(source, "value") == "value"
        assert last.of(source) is None


def test_it_is_copied_and_pickled_with_what_holds_it():
    last = LastValue()
    last.keep(source := models(), "value")
    for again in (copy.deepcopy(last), pickle.loads(pickle.dumps(last))):
        assert again.of(source) is None  # its tensors are copies
    assert last.of(source) == "value"


CACHING = ["fedavg", "fedavg_plus", "fesem_plus", "femam", "fedfa", "nefl"]
QUICK = [("fedavg", "written to"), ("fedfa", "replaced")]


@pytest.mark.parametrize(("name", "how"), some(product(CACHING, ["written to", "replaced"]), QUICK))
def test_predictions_are_those_of_the_server_as_it_is_now(make_federation, name, how):
    """The same dict, asked about again after its tensors have changed; an algorithm that never saw it before knows
    what it predicts now.
    """
    if name in ("fedfa", "nefl"):
        fed = mixed("static_batch")
    else:
        fed = make_federation("resnet20", norm="static_batch" if name == "fedavg" else None)
    algorithm = made(name, fed)
    server = play(algorithm, fed, 3)[-1][0]
    if name == "fedavg":  # of other tensors than those of other tests
        server = {"global": {n: t.clone() for n, t in server["global"].items()}}
    x, parts = fed.data.test_x, fed.clients.valid
    owners = torch.arange(len(parts)).repeat_interleave(parts.sizes)

    def predicted(algorithm):
        each = [algorithm.predict(server, x, client) for client in (None, 0, 1)]
        return [*each, predict_all(fed, algorithm.client_models(server), parts.samples, owners)]

    before = predicted(algorithm)
    for part, state in server.items():
        for key, tensor in state.items():
            if tensor.is_floating_point() and part not in ("progress", "rng"):
                if how == "written to":
                    tensor.mul_(0.7).add_(0.01)
                else:
                    state[key] = 0.7 * tensor + 0.01
    fresh = type(fed)(**{n: getattr(fed, n) for n, f in fed.__dataclass_fields__.items() if f.init})
    expected = predicted(made(name, fresh))
    for old, found, wanted in zip(before, predicted(algorithm), expected, strict=True):
        assert torch.equal(found, wanted)
        assert not torch.equal(old, found)


def test_statistics_are_those_of_the_model_that_is_asked_about(make_federation):
    fed = make_federation("resnet20", norm="static_batch")
    state, other = fed.initial(), copy.deepcopy(fed.model)
    for module in other.modules():
        if hasattr(module, "eps"):
            module.eps = 10.0
    one, two = fed.statistics(state), fed.statistics(state, other)
    assert any(not torch.equal(one[name], two[name]) for name in one)
