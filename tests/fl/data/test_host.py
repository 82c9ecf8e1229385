"""Samples that are kept on the host, in memory or in files: the same results, with a cohort's samples on the device."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pretend_gpu import PretendGPU
from refusals import fl_refused
from rounds import made, on_gpu, results
from torch.utils.data import TensorDataset

import fl
import fl.run
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.data import Dataset, fingerprint, folder, load, mapped
from fl.federation.local_training import LocalObjective
from fl.runs import evaluate

TINY = fl.Config.of(
    algorithm="fedavg", samples=240, clients=6, participants=3, rounds=2, local_epochs=1, width=0.1, device="cpu"
)
CASES = {
    "loop": {"backend": "loop", "crop": 2},
    "vmap, clients that test": {"backend": "vmap", "local_test": 0.2},
    "workers, some at a time": {"backend": "workers", "max_parallel_clients": 2, "last_batch": "partial"},
    "values of each sample": {"algorithm": "femam", "local_valid": 0.2, "local_test": 0.2},
    "prototypes": {"algorithm": "fedproto", "local_test": 0.2},
    "static batch norms": {"algorithm": "heterofl", "norm": "static_batch", "eval_client_models_every": 1},
    "masked": {"masked_loss": True, "attack": fl.AttackOptions(share=0.4)},
    "text": {"samples": 0, "model": "transformer", "partition": "contiguous", "local_test": 0.2},
}


def own_data(case):
    """Tokens, each of which is the one before and one more; None: digits."""
    if case != "text":
        return None
    tokens = (torch.arange(80)[:, None] + torch.arange(9)) % 7
    return Dataset.from_arrays(tokens[:, :-1], tokens[:, 1:], tokens[:9, :-1], tokens[:9, 1:])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_simulate__results_are_those_of_data_on_the_device(tmp_path, case):
    """Bit for bit."""
    found = []
    for where in ("device", "host"):
        config = TINY.replace(**CASES[case], data_on=where)
        fl.simulate(config, tmp_path / where, dataset=own_data(case))
        found.append(results(tmp_path / where))
    assert found[0] == found[1]


@pytest.mark.parametrize("where", ["host", "device"])
def test_host__the_command_leaves_samples_where_they_are_to_lie(pretended, tmp_path, monkeypatch, where):
    """A device with too little memory never gets all of them."""
    moved, to = [], Dataset.to

    def seen(data, device, *place):
        moved.append(to(data, device, *place))
        return moved[-1]

    monkeypatch.setattr(Dataset, "to", seen)
    flags = ["--samples", "60", "--clients", "2", "--participants", "2", "--rounds", "1", "--local-epochs", "1"]
    flags += ["--width", "0.1", "--device", "cuda", "--backend", "loop", "--out", str(tmp_path), "--name", "a"]
    assert fl.run.main([*flags, "--data-on", where]) == 0
    assert {data.x.is_cuda for data in moved} == {where == "device"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "femam", "fedproto"])
def test_host__the_cohort_s_samples_alone_go_to_the_device(make_federation, name, monkeypatch):
    """On a pretended GPU, which refuses operations on two devices."""
    with PretendGPU():
        fed, sizes = make_federation("cnn"), []
        resident = on_gpu(fed, backend="vmap")
        kept = replace(resident, data=fed.data.to("cuda", "host"))
        assert kept.data.x.device.type == kept.data.y.device.type == "cpu"
        assert kept.data.device.type == "cuda"
        honest = type(kept).group

        def group(*given):
            job, *rest = honest(*given)
            sizes.append(job.data.x.shape[0])
            assert job.data.x.is_cuda
            return job, *rest

        monkeypatch.setattr(type(kept), "group", group)

        def measured(one):
            algorithm = made(name, one)
            server, _ = algorithm.round(algorithm.init(), [2, 0], Rng(0, 1))
            scores = evaluate.score_clients(one, lambda: algorithm.client_models(server))
            return scores, evaluate.evaluate_global(one, lambda x: algorithm.predict(server, x, None))

        assert measured(resident) == measured(kept)
        assert sizes[-1] == len(fed.clients.train[2]) + len(fed.clients.train[0]) < sizes[0]


def test_host__graphs_do_not_read_samples_that_change_place(make_federation):
    with PretendGPU():
        fed = on_gpu(make_federation("cnn"), backend="auto")
        fed = replace(fed, data=fed.data.to("cpu").to("cuda", "host"))
        with fl_refused("unsupported", "--backend"):
            fed.with_local(backend="graphs")


def test_host__values_of_samples_go_with_them(make_federation):
    fed = make_federation("cnn")
    kept = replace(fed, data=fed.data.to("cpu", "host"))
    each = LocalObjective(fed.local.objective, {}, per_sample=torch.arange(len(fed.data.y)))
    whole, some = (one.group(one.model, {}, [2, 0], each, Rng(0, 1))[0] for one in (fed, kept))
    for client in (0, 1):  # whose steps are followed by padding
        steps = whole.batches.steps[client]
        at, there = (job.batches.index[client, :steps] for job in (whole, some))
        assert torch.equal(whole.per_sample[at], some.per_sample[there])
        assert torch.equal(whole.data.y[at], some.data.y[there])
    assert len(some.per_sample) == len(some.data.y) < len(fed.data.y)


def save(where: Path, data: Dataset, **settings) -> Path:
    where.mkdir()
    for name in ("x", "y", "test_x", "test_y"):
        np.save(where / f"{name}.npy", getattr(data, name).numpy())
    if settings:
        (where / "settings.json").write_text(json.dumps(settings))
    return where


@pytest.mark.slow
def test_simulate__a_folder_holds_the_same_data(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "_PIECE", 5000)  # of 64 bytes a sample
    digits = load("digits").subsample(240)
    save(tmp_path / "digits", digits, top=16, names=list("abcdefghij"))
    data = load(f"folder:{tmp_path / 'digits'}")
    assert all(map(mapped.is_mapped, (data.x, data.y, data.test_x, data.test_y)))
    assert data.on_host
    assert data.names == tuple("abcdefghij")
    assert fingerprint(data) == fingerprint(digits)
    there = data.to("cpu", "device")
    assert not there.on_host
    assert torch.equal(data.samples_at(torch.tensor([3, 200])), digits.x[[3, 200]])
    for name, given in (("mapped", {"dataset": f"folder:{tmp_path / 'digits'}", "samples": 0}), ("plain", {})):
        fl.simulate(TINY.replace(**given), tmp_path / name)
    assert results(tmp_path / "mapped") == results(tmp_path / "plain")
    # relative to the root of data sets
    fl.simulate(TINY.replace(dataset="folder:digits", data_root=str(tmp_path)), tmp_path / "relative")


def test_host__a_map_that_is_read_only_is_not_copied(tmp_path):
    where = save(tmp_path / "digits", load("digits"))
    given = {n: np.load(where / f"{n}.npy", mmap_mode="r") for n in ("x", "y", "test_x", "test_y")}
    data = Dataset.from_arrays(**given, top=16)
    assert data.x.data_ptr() == given["x"].ctypes.data
    assert data.on_host


def pages_of_files() -> int:
    """Bytes of files that this process has in memory."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssFile"].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says what is in memory")
def test_host__a_process_keeps_no_pages_of_what_it_has_read(tmp_path, monkeypatch):
    n, most = 2**15, []
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, (n, 1, 32, 32))
    x[:], x_bytes = 7, x.nbytes
    x.flush()
    del x
    np.save(tmp_path / "test_x.npy", np.zeros((4, 1, 32, 32), np.uint8))
    for name, labels in (("y", np.arange(n) % 3), ("test_y", np.arange(4) % 3)):
        np.save(tmp_path / f"{name}.npy", labels)
    honest, before = mapped.release, pages_of_files()

    def release(values):
        most.append(pages_of_files() - before)
        honest(values)

    monkeypatch.setattr(mapped, "release", release)
    monkeypatch.setattr(mapped, "_PIECE", 2**20)
    data = Dataset.from_folder(tmp_path)
    fingerprint(data)
    assert data.samples_at(torch.randint(n, (500,))).shape == (500, 1, 32, 32)
    assert len(most) > 2 * 32 + 500 // 32
    assert max(most) < x_bytes / 2


TABLE = torch.arange(24.0).view(8, 3) / 24
LABELS = torch.arange(8) % 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda at: (at / "y.npy").unlink(), "test_x.*test_y"),
        (lambda at: np.save(at / "x.npy", TABLE.double().numpy()), r"x.npy holds float64: write uint8 images, float32"),
        (lambda at: np.save(at / "x.npy", np.where(TABLE > 0.9, np.nan, TABLE)), r"x\[7\]"),
        (lambda at: np.save(at / "y.npy", np.array(["a", {}], object)), r"y.npy cannot be mapped into memory"),
        (lambda at: (at / "settings.json").write_text("{"), "JSON"),
        (lambda at: (at / "settings.json").write_text('{"class": 3}'), "'class'"),
        (lambda at: [(at / "x.npy").unlink(), (at / "dataset_dict.json").touch()], r"fl.data.folder.write, once"),
    ],
)
def test_host__folders_that_are_refused(tmp_path, change, said):
    where = save(tmp_path / "table", Dataset.from_arrays(TABLE, LABELS, TABLE, LABELS))
    np.save(where / "x.npy", TABLE.numpy())
    change(where)
    with pytest.raises(FLError, match=said), np.errstate(all="ignore"):
        Dataset.from_folder(where)


@pytest.mark.parametrize(
    ("call", "said"), [(lambda data: data.pad(1), "--pad"), (lambda data: data.pool(), "--pool-test-set")]
)
def test_host__copies_of_all_samples_are_refused(call, said):
    with fl_refused("unsupported", said):
        call(load("digits").to("cpu", "host"))


def test_host__data_that_do_not_fit_on_the_device(monkeypatch):
    def full(self, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    data = load("digits")
    monkeypatch.setattr(torch.Tensor, "to", full)
    with fl_refused("memory", "0.0", "GB", "--data-on"):
        data.to("cpu")


def test_write__writing_what_torch_has(tmp_path):
    parts = [TensorDataset(TABLE.double(), LABELS), TensorDataset(TABLE[:4].double(), LABELS[:4])]
    data = folder.write(tmp_path / "table", *parts)
    assert fingerprint(data) == fingerprint(Dataset.from_torch(*parts))
    assert data.on_host
    with fl_refused("file"):
        folder.write(tmp_path / "table", *parts)
    numbers = [TensorDataset(TABLE, TABLE[:, :2]), TensorDataset(TABLE, TABLE[:, :2])]
    assert folder.write(tmp_path / "numbers", *numbers, task="regression").task == "regression"
    with fl_refused("data", "train[0]"):
        folder.write(tmp_path / "wrong", *numbers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["numbers", "table"]  # and nothing half done


@pytest.mark.slow
def test_write__writing_what_hugging_face_has(tmp_path):
    hf = pytest.importorskip("datasets")
    rows = {
        "image": [Image.fromarray(np.full((6, 5), k, np.uint8)) for k in range(8)],
        "label": LABELS.tolist(),
        "writer": [f"w{k // 4}" for k in range(8)],
    }
    kinds = hf.Features(
        {"image": hf.Image(), "label": hf.ClassLabel(names=["no", "yes"]), "writer": hf.Value("string")}
    )
    part = hf.Dataset.from_dict(rows, features=kinds)
    hf.DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path / "arrow")
    with fl_refused("file", "load_from_disk"):
        Dataset.from_folder(tmp_path / "arrow")
    there = hf.load_from_disk(tmp_path / "arrow")
    data = folder.write(tmp_path / "folder", there["train"], there["test"], owner="writer")
    assert fingerprint(data) == fingerprint(Dataset.from_huggingface(part, part, owner="writer"))
    assert data.names == ("no", "yes")
    assert data.owners.tolist() == [0] * 4 + [1] * 4
