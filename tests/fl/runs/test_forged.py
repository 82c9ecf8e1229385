"""Files of a run that were damaged, edited or lost: a line each, and nothing is overwritten."""

import csv
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import fl
from fl import compare, engine, simulate
from fl.analysis.groups import find_runs
from fl.base import tensors
from fl.config import Config
from fl.runs import checkpoint, evaluate

CONFIG = Config(
    algorithm=("fedavg",), clients=3, participants=1, samples=90, rounds=1, local_epochs=1, batch_size=50, width=0.1,
    models_every=0, backend="loop",
)  # fmt: skip


@pytest.fixture(scope="module")
def data():
    return CONFIG.load()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("runs") / "a"
    simulate(CONFIG, folder, dataset=data)
    return folder


@pytest.fixture
def folder(tmp_path, trained):
    """A copy of a run to spoil."""
    return shutil.copytree(trained, tmp_path / "a")


def refused(folder, data, match, config=CONFIG):
    """Resuming is a line, and changes nothing."""
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file() and not path.is_symlink()}
    with pytest.raises(fl.FLError, match=match) as error:
        simulate(config, folder, resume=True, dataset=data)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    assert {path: path.read_bytes() for path in before} == before
    assert not [path for path in folder.iterdir() if path.is_file() and not path.is_symlink() and path not in before]


def rewritten(path, change):
    """The checkpoint with what `change` makes of its header, a text."""
    with safe_open(path, framework="pt") as file:
        tensors, header = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    (name,) = header
    save_file(tensors, path, metadata={name: change(header[name])})


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "not json",
        lambda text: "[]",
        lambda text: '{"checksum": "00000000"}',
        lambda text: text.replace('"round": 1', '"round": 2'),
        lambda text: text.replace('"lr": 0.02', '"lr": 0.03'),
        lambda text: text.replace("checkpoint-3", "checkpoint-4"),
    ],
)
def test_forged_headers(folder, data, change):
    rewritten(folder / checkpoint.FILE, change)
    refused(folder, data, r"checkpoint\.safetensors is damaged \(its header is not as it was written\)")
    with pytest.raises(fl.FLError, match="is damaged"):
        fl.load_model(folder)


def test_other_formats_are_named(folder, data, tmp_path):
    path = folder / checkpoint.FILE
    tensors.write(path, "checkpoint-9", {}, {})
    refused(folder, data, "is of format checkpoint-9, and this version reads checkpoint-3 here")
    save_file({"a": torch.zeros(1)}, path, metadata={"format": "pt"})
    refused(folder, data, "is no checkpoint that this version reads: put the right file there")


def test_the_same_content_is_the_same_file_and_shared_memory_is_no_matter(tmp_path):
    one = torch.arange(6.0)
    mine = {"b": one, "a": one.view(2, 3).T, "c": torch.tensor(3), "d": torch.zeros(0, 2)}
    for name in "xy":
        tensors.write(tmp_path / name, "mine-1", mine, {"k": [1, None, 0.1]})
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    found, header = tensors.read(tmp_path / "x", "mine-1")
    assert header == {"k": [1, None, 0.1]}
    assert found.keys() == mine.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in mine.items())


def test_a_checkpoint_without_settings_and_rows_goes_on(folder, data):
    """As Python wrote it."""
    spec, server = checkpoint.read_parts(folder)
    server.pop("statistics", None)
    checkpoint.save(folder, server, 1, spec, {})
    assert simulate(CONFIG, folder, resume=True, dataset=data)["rounds"] == 1


def test_flipped_bits(folder, data):
    path = folder / checkpoint.FILE
    whole = path.read_bytes()
    for place, match in (
        (len(whole) - 3, r"is damaged \(its tensors are not as they were written\)"),
        (8 + whole[8:].index(b'round\\": 1') + 9, "is damaged"),
        (8 + whole[8:].index(b"checksum") + 20, "is damaged|cannot be read"),
    ):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 2]) + whole[place + 1 :])
        refused(folder, data, match)
    path.write_bytes(whole)
    simulate(CONFIG, folder, resume=True, dataset=data)
    assert path.read_bytes() == whole


def test_other_dtypes(folder, data):
    spec, server = checkpoint.read_parts(folder)
    server = {part: {name: tensor.double() for name, tensor in state.items()} for part, state in server.items()}
    checkpoint.save(folder, server, 1, spec, {})
    refused(folder, data, r"is torch\.float64 there, and torch\.float32 in this run")


def test_what_is_no_file_of_a_run(folder, data):
    path = folder / checkpoint.FILE
    path.unlink()
    path.symlink_to("/dev/zero")
    refused(folder, data, "no regular file")


def test_settings_that_were_edited_by_hand_are_named(folder, data):
    text = (folder / "config.yaml").read_text().replace("lr: 0.02", "lr: 0.5")
    (folder / "config.yaml").write_text(text)
    refused(folder, data, r"was trained with --lr 0\.02, and now it is 0\.5: put 0\.02 back", Config.read(folder))
    more = Config.from_yaml(text.replace("lr: 0.5", "lr: 0.02").replace("rounds: 1", "rounds: 2"))
    assert simulate(more, folder, resume=True, dataset=data)["rounds"] == 2


def test_a_checkpoint_that_is_gone(folder, data):
    (folder / checkpoint.FILE).unlink()
    refused(folder, data, r"checkpoint\.safetensors is gone, though 1 rounds were done: put it back")


def test_tables_with_repeated_rounds_and_without_an_end(folder, data, capsys):
    path = folder / "metrics.csv"
    whole = path.read_bytes()
    head, row = whole.splitlines(keepends=True)

    def compared(match):
        assert compare.main([str(folder), "--out", str(folder.parent / "f.png")]) == 2
        error = capsys.readouterr().err
        assert match in error
        assert error.count("\n") == 1

    path.write_bytes(head + row + row)
    compared("metrics.csv has round 1 twice, as if two processes had written it")
    path.write_bytes(head + b"3" + row[1:] + row)
    compared("has round 1 out of order")
    path.write_bytes(head + b"-1" + row[1:])
    compared("not a table of rounds")
    path.unlink()
    path.symlink_to("/dev/zero")
    compared("metrics.csv is no regular file")
    refused(folder, data, "no regular file")
    path.unlink()
    path.write_bytes(whole)
    with open(path, "ab") as file:
        file.truncate(2**29)
    compared("has 536,870,912 bytes, more than a file of a run ever has")
    (folder / "config.yaml").unlink()
    (folder / "config.yaml").symlink_to("/dev/zero")
    compared("config.yaml is no regular file")


@pytest.fixture(scope="module")
def kept(tmp_path_factory, data):
    """Two runs that differ in their seed, with a best round before the last."""
    found = []
    for seed in (0, 1):
        config = replace(CONFIG, seeds=(seed,), rounds=4, keep_best=True, checkpoint_every=2, lr=0.2)
        found.append(tmp_path_factory.mktemp("kept") / f"s{seed}")
        scores = iter((0.3, 0.9, 0.4, 0.5))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evaluate, "evaluate_global", lambda *_, s=scores: {"accuracy": next(s), "loss": 1.0})
            simulate(config, found[-1], dataset=data)
    return found


def cells(change):
    """A change of the table's rows, each a dict of texts."""

    def damage(folder, other):
        path = folder / "metrics.csv"
        with open(path, newline="") as file:
            rows = [*csv.DictReader(file)]
        rows = change(rows) or rows
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)

    return damage


def renamed(rows):
    return [{name.replace("accuracy", "acuracy"): text for name, text in row.items()} for row in rows]


def copied(name):
    return lambda folder, other: shutil.copy(other / name, folder / name)


def cut(name):
    return lambda folder, other: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def gone(name):
    return lambda folder, other: (folder / name).unlink()


TABLE, POINT = "metrics.csv", "checkpoint.safetensors"
DAMAGE = {
    "an accuracy": (cells(lambda rows: rows[2].update(accuracy="0.99")), "left: round 3 has other", "rcb"),
    "a loss": (cells(lambda rows: rows[0].update(train_loss="0.5")), "left: round 1 has other", "rcb"),
    "a heading": (cells(renamed), r"metrics\.csv is not the table", "rcb"),
    "another's table": (copied(TABLE), "left: round 1 has other numbers than", "rcb"),
    "a table cut off": (cut(TABLE), r"metrics\.csv does not hold rounds 1 to 4, .*: put the table back", "rcb"),
    "no table": (gone(TABLE), r"metrics\.csv does not hold rounds 1 to 4, .*: put the table back", "rb"),
    "another's checkpoint": (copied(POINT), r"was trained with --seeds 1, and now it is 0: put 1 back", "rcbe"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_table_belongs_to_its_checkpoint(kept, tmp_path, data, name):
    """Resuming (r), comparing (c), and exporting the best (b) or the last model (e) say so if they read the file."""
    damage, match, told = DAMAGE[name]
    folder = shutil.copytree(kept[0], tmp_path / "a")
    damage(folder, kept[1])
    config = Config.read(folder)
    refused(folder, data, match, config)
    calls = {
        "c": lambda: find_runs([folder]),
        "b": lambda: fl.export(folder, tmp_path / "b.pt", best=True),
        "e": lambda: fl.export(folder, tmp_path / "e.pt"),
    }
    for what, call in calls.items():
        if what in told:
            with pytest.raises(fl.FLError, match=match):
                call()
        elif name != "no table" or what == "e":
            call()
    assert simulate(replace(config, rounds=5), shutil.copytree(kept[0], tmp_path / "whole"), True, data)["rounds"] == 5


def test_all_tables_are_read_before_one_is_changed(tmp_path, data):
    config, folder = replace(CONFIG, local_valid=0.2), tmp_path / "a"
    simulate(config, folder, dataset=data)
    cells(lambda rows: [*rows, rows[0] | {"round": "2"}])(folder, None)
    os.truncate(folder / "clients.csv", 40)
    refused(folder, data, r"clients\.csv does not hold the clients of all evaluated rounds: put the table back", config)


def test_what_a_kill_leaves_and_an_end_measured_is_no_damage(kept, tmp_path, data):
    """Rounds after the checkpoint, other seconds, and evaluations that a resumed run has dropped, may be."""
    folder = shutil.copytree(kept[0], tmp_path / "a")
    cells(lambda rows: [*rows, rows[3] | {"round": "5", "accuracy": "0.99"}])(folder, None)
    cells(lambda rows: rows[0].update(seconds="7.5"))(folder, None)
    cells(lambda rows: rows[3].update(accuracy="", loss="", f1=""))(folder, None)
    find_runs([folder])
    assert fl.export(folder, tmp_path / "b.pt", best=True).exists()
    assert simulate(replace(Config.read(folder), rounds=5), folder, True, data)["rounds"] == 5


def test_a_heading_of_an_earlier_version_s_table_is_told_with_its_file(folder, data):
    spec, server = checkpoint.read_parts(folder)
    checkpoint.save(folder, server, 1, spec, {})
    cells(renamed)(folder, None)
    refused(folder, data, r"a/metrics\.csv has a column 'acuracy', which is no metric of this run: put back")


def test_a_resumed_run_keeps_to_the_backend_that_auto_chose(tmp_path, data, monkeypatch):
    used, order = [], ["vmap", "loop"]
    monkeypatch.setattr(engine, "ranked", lambda groups: order)
    for name in ("vmap", "loop"):
        real = engine.BACKENDS[name]
        monkeypatch.setitem(engine.BACKENDS, name, lambda groups, n=name, r=real: used.append(n) or r(groups))
    config, folder = replace(CONFIG, backend="auto"), tmp_path / "a"
    simulate(config, folder, dataset=data)
    order.reverse()  # as on a machine with other threads
    simulate(replace(config, rounds=2), folder, resume=True, dataset=data)
    simulate(config, tmp_path / "b", dataset=data)
    assert used == ["vmap", "vmap", "loop"]
