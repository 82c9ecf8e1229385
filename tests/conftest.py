"""Fixtures that several test files use."""

import gc
import os
import signal
from collections import defaultdict

# Before torch is imported: the processes of pytest-xdist share the cores, and a thread that waits must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import hypothesis
import pytest
import torch
from fleets import local
from matplotlib.figure import Figure
from pretend_gpu import PretendGPU
from wrapped import wrapped

import zoo
from fl import engine
from fl.data import Dataset
from fl.engine import graphs
from fl.extensions.language.adapters import add_adapters
from fl.federation import Federation
from fl.figures import curves, style
from fl.partition import Split
from surgery import transfer

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a shell's background jobs, and so of what tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("explore", deadline=None)  # a busy machine is no failure
hypothesis.settings.register_profile("repeat", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeat")

gc.disable()  # until all test files are imported, see below


def once_for_equal_defaults(make):
    """Make the parser of a class and a default only once, and keep the last few: nothing changes them."""
    parsers = {}

    def remembered(kind, **options):
        if options["intern_prefix"]:  # a part of one
            return make(kind, **options)
        key = kind, repr(options)
        if key not in parsers:
            parsers[key] = make(kind, **options)
            if len(parsers) > 8:
                del parsers[next(iter(parsers))]
        return parsers[key]

    return remembered


with suppress(ImportError, AttributeError):  # tyro reads the settings and their docstrings anew for each command line
    from tyro import _docstrings, _parsers

    _docstrings.get_field_docstring = cache(_docstrings.get_field_docstring)
    of_class = _parsers.ParserSpecification
    of_class.from_callable_or_type = staticmethod(once_for_equal_defaults(of_class.from_callable_or_type))


@pytest.hookimpl(tryfirst=True)  # before nightly tests are left out
def pytest_collection_modifyitems(items):
    """By default a test runs with all cases that are not marked slow. Where all are, `.ci/run` runs the first one."""
    cases = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, ("nightly", "gpu"))):
            cases[item.path, item.originalname].append(item)
    for each in cases.values():
        slow = [item for item in each if item.get_closest_marker("slow")]
        for item in slow[len(slow) == len(each) :]:
            item.add_marker("nightly")


def pytest_collection_finish():
    """What was imported stays, and need not be looked at again whenever garbage is collected: a tenth of the time."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """One thread, so that processes of pytest-xdist do not fight; two for `workers`, which is clients side by side in
    threads.
    """
    before, workers = torch.get_num_threads(), engine.BACKENDS["workers"]

    def side_by_side(groups):
        torch.set_num_threads(2)
        try:
            return workers(groups)
        finally:
            torch.set_num_threads(1)

    monkeypatch.setitem(engine.BACKENDS, "workers", side_by_side)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


DRAW = Figure.savefig, curves.run_figure


@pytest.fixture(autouse=True, scope="module")
def nothing_is_drawn_and_the_disk_is_not_waited_for():
    """Drawing a run and waiting for the disk take longer than most of what it trains.

    Files with other content stand for figures. Also for runs that the tests of a file share.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, path, **_: Path(path).write_bytes(b"a figure"))
        patch.setattr(curves, "run_figure", lambda rows, title, path, quantity="": style.save(Figure(), path))
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True)
def figures_are_drawn(request, monkeypatch):
    """In tests that are marked `drawn`."""
    if request.node.get_closest_marker("drawn"):
        monkeypatch.setattr(Figure, "savefig", DRAW[0])
        monkeypatch.setattr(curves, "run_figure", DRAW[1])


@pytest.fixture
def data_root() -> Path:
    """The folder with real data sets, for tests that need more than digits."""
    root = os.environ.get("FL_DATA_ROOT")
    if not root:
        pytest.skip("FL_DATA_ROOT is not set: no folder with CIFAR-10 and Fashion-MNIST")
    return Path(root)


@pytest.fixture
def pretended(monkeypatch):
    """A GPU that is not there, see `pretend_gpu`."""
    monkeypatch.setattr(graphs, "_POOL", {})
    with PretendGPU() as gpu:
        yield gpu


@pytest.fixture
def pretended_mps(monkeypatch):
    """A device without float64 that is not there, as Apple's GPUs are; its tensors say that they are on CUDA."""
    monkeypatch.setattr(transfer, "WITHOUT_FLOAT64", {"cuda"})
    with PretendGPU(without=torch.float64) as gpu:
        yield gpu


@pytest.fixture(params=["pretended", pytest.param("real", marks=pytest.mark.gpu)])
def cuda(request):
    """A GPU: one that is not there, and with `pytest -m gpu` a real one (None)."""
    if request.param == "pretended":
        return request.getfixturevalue("pretended")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return None


@pytest.fixture
def make_federation():
    """A function that makes a tiny federation of ragged clients on random images, with two to validate on and one to
    test on each.
    """

    def make(
        model="cnn",
        sizes=(3, 7, 12, 5),
        participants=3,
        dtype=torch.float32,
        adapters=None,
        base_changes=False,
        **settings,
    ) -> Federation:
        generator = torch.Generator().manual_seed(0)
        every = sum(sizes) + 3 * len(sizes)
        x = torch.randint(256, (every, 1, 8, 8), generator=generator).byte()
        y = torch.randint(3, (every,), generator=generator)
        data = Dataset("random", x, y, x, y, classes=3)
        if isinstance(model, str):
            arguments = {"num_classes": 3, "in_channels": 1, "image_size": 8, "width": 0.25}
            depth = settings.pop("depth", 1)  # a block in each section has all kinds of tensors
            arguments |= {"depth": depth} if "resnet20" in model else {}
            arguments |= {"norm": settings.pop("norm", None), "exits": settings.pop("exits", None)}
            create = partial(zoo.create, model, **arguments)
            model = create(generator).to(dtype)
            settings = {"create": lambda generator: create(generator).to(dtype), **settings}
        if adapters:
            model = add_adapters(model, adapters, generator, base_changes=base_changes)
        training = torch.arange(sum(sizes)).split(list(sizes))
        others = torch.arange(sum(sizes), every).split(3)
        clients = [Split(part, other[:2], other[2:]) for part, other in zip(training, others, strict=True)]
        settings = {"epochs": 2, "batch_size": 4, **settings}
        around = {name: settings.pop(name) for name in ("attack", "defence", "pace") if name in settings}
        return wrapped(Federation(model, data, clients, participants, *local(settings), **settings), **around)

    return make
