"""Files of a run that were damaged, edited or lost: a line each that names the file, and nothing is overwritten."""

import csv
import errno
import io
import os
import re
import shutil
from dataclasses import asdict, replace
from unittest.mock import patch

import pytest
import torch
from refusals import fl_refused
from safetensors import safe_open
from safetensors.torch import save_file
from selection import some

import fl
from fl import engine, simulate
from fl.analysis.groups import find_runs
from fl.base import tensors
from fl.models import make_spec
from fl.runs import checkpoint, evaluate
from fl.settings import Config
from fl.settings.command_line import parse
from zoo.spec import PRESETS

CONFIG = Config.of(
    algorithm="fedavg", clients=3, participants=1, samples=90, rounds=1, local_epochs=1, batch_size=50, width=0.1,
    backend="loop",
)  # fmt: skip
MEASURED = "accuracy", "loss", "f1", "local"
SETTINGS, TABLE, CLIENTS = "config.yaml", "metrics.csv", "clients.csv"
POINT, START = "checkpoint.safetensors", "start.safetensors"


@pytest.fixture(scope="module")
def data():
    return CONFIG.load()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data):
    """A run with all files that there are, whose best round is not its last, and others: by what they differ in."""
    weights = tmp_path_factory.mktemp("weights") / "cnn.safetensors"
    save_file(fl.build(CONFIG, data)[0].initial(), weights)
    config = CONFIG.replace(rounds=4, keep_best=True, checkpoint_every=2, lr=0.2, local_valid=0.1, init=str(weights))
    others = {"": {}, "seed": {"seed": 1}, "width": {"width": 0.2, "init": None}, "method": {"algorithm": "fedmr"}}
    found = {name: tmp_path_factory.mktemp("runs") / "a" for name in others}
    for name, changes in others.items():
        scores = iter((0.3, 0.9, 0.4, 0.5))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evaluate, "evaluate_global", lambda *_, s=scores: {"accuracy": next(s), "loss": 1.0})
            simulate(config.replace(**changes), found[name], dataset=data)
    return found


def cells(change):
    """A change of the table's rows, each a dict of texts."""

    def damage(path, runs):
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


def content(change):
    """A change of the bytes; given some, they are the file's."""
    return lambda path, runs: path.write_bytes(change if isinstance(change, bytes) else change(path.read_bytes()))


def flipped(find):
    """A bit, at the place that is found in the bytes."""
    return content(lambda whole: whole[: (at := find(whole))] + bytes([whole[at] ^ 2]) + whole[at + 1 :])


def header(change):
    """The checkpoint with what `change` makes of its header, a text."""

    def damage(path, runs):
        with safe_open(path, framework="pt") as file:
            kept, texts = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
        (name,) = texts
        save_file(kept, path, metadata={name: change(texts[name])})

    return damage


def doubled(path, runs):
    spec, server = checkpoint.read_parts(path.parent)
    server = {part: {name: tensor.double() for name, tensor in state.items()} for part, state in server.items()}
    checkpoint.save(path.parent, server, 4, spec, {})


def other(name):
    return lambda path, runs: shutil.copy(runs[name] / path.name, path)


def gone(path, runs):
    path.unlink()


def endless(path, runs):
    path.unlink()
    path.symlink_to("/dev/zero")


def huge(path, runs):
    os.truncate(path, 2**29)


cut = content(lambda whole: whole[: len(whole) // 2])
DAMAGE = {
    (POINT, "a header that is no JSON"): (header(lambda text: "not json"), "is damaged", "rbec"),
    (POINT, "another round"): (header(lambda text: text.replace('"round": 4', '"round": 2')), "is damaged", "rbec"),
    (POINT, "another rate"): (header(lambda text: text.replace('"lr": 0.2', '"lr": 0.3')), "is damaged", "rbec"),
    (POINT, "another version"): (header(lambda text: text.replace("point-3", "point-4")), "is damaged", "rbec"),
    (POINT, "another's file"): (lambda path, _: save_file({"a": torch.zeros(1)}, path), "no checkpoint", "rbec"),
    (POINT, "a bit of a tensor"): (flipped(lambda whole: len(whole) - 3), "is damaged", "rbe"),
    (POINT, "a bit of the header"): (flipped(lambda whole: whole.index(b'round\\": 4') + 9), "is damaged", "rbec"),
    (POINT, "a bit of a checksum"): (flipped(lambda whole: whole.index(b"checksum") + 20), "damaged|read", "rbec"),
    (POINT, "other numbers"): (doubled, "torch.float64|--keep-best", "rb"),
    (POINT, "no file"): (endless, "no regular file", "rbec"),
    (POINT, "a file cut off"): (cut, "cannot be read", "rbec"),
    (POINT, "nothing"): (gone, "is gone|has no", "rbe"),
    (POINT, "another seed"): (other("seed"), "--seeds 1", "rbec"),
    (POINT, "another width"): (other("width"), "width 0.2|width was", "rbec"),
    (POINT, "another method"): (other("method"), "--algorithm fedmr|another model", "rbec"),
    (TABLE, "another accuracy"): (cells(lambda rows: rows[2].update(accuracy="0.99")), "round 3", "rbc"),
    (TABLE, "another loss"): (cells(lambda rows: rows[0].update(train_loss="0.5")), "round 1", "rbc"),
    (TABLE, "another heading"): (cells(renamed), "acuracy|not the table", "rbc"),
    (TABLE, "a round twice"): (cells(lambda rows: [rows[0], *rows]), "round 1 twice|hold rounds", "rbc"),
    (TABLE, "a round below 1"): (cells(lambda rows: rows[0].update(round="-1")), "table of rounds", "rbc"),
    (TABLE, "a word"): (cells(lambda rows: rows[3].update(accuracy="half")), "table of rounds", "rbc"),
    (TABLE, "other columns"): (content(b"step,foo\n1,2\n"), "table of rounds", "rbc"),
    (TABLE, "no text"): (content(b"\xff\xfe,\n1\n"), "table of rounds", "rbc"),
    (TABLE, "no rounds"): (content(b""), "put the table back", "rbc"),
    (TABLE, "nothing"): (gone, "put the table back|no metrics.csv", "rbc"),
    (TABLE, "no file"): (endless, "no regular file", "rbc"),
    (TABLE, "half a gigabyte"): (huge, "536,870,912 bytes", "rbc"),
    (CLIENTS, "a table cut off"): (cut, "put the table back", "r"),
    (CLIENTS, "other columns"): (content(lambda whole: whole.replace(b"_loss", b"")), "put the table back", "r"),
    (CLIENTS, "nothing"): (gone, "put the table back", "r"),
    (START, "a bit of a tensor"): (flipped(lambda whole: len(whole) - 3), "put back a copy", "r"),
    (START, "nothing"): (gone, "is gone", "r"),
    (START, "no file"): (endless, "no regular file", "r"),
    (SETTINGS, "another rate"): (content(lambda text: text.replace(b"lr: 0.2", b"lr: 0.5")), "put 0.2 back", "rbec"),
    (SETTINGS, "a word"): (content(b"rounds: abc"), "rounds", "rbec"),
    (SETTINGS, "a word in a list"): (content(b"seeds: [a]"), "seeds", "rbec"),
    (SETTINGS, "an option that there is not"): (content(b"fedmr: {speed: 3}"), "fedmr.speed", "rbec"),
    (SETTINGS, "no YAML"): (content(b"a: ["), "YAML", "rbec"),
    (SETTINGS, "no text"): (content(b"\xff\xfe\x00"), "text|config.yaml", "rbec"),
    (SETTINGS, "no file"): (endless, "regular file", "rbec"),
}  # fmt: skip


def said_by_readers(folder, place, data, told):
    """What the readers of a run folder say that is wrong with it.

    Resuming (r), which is tried if it is among those `told`, comparing (c), and exporting the best (b) or the last
    model (e).
    """
    calls = {
        "r": lambda: simulate(Config.read(folder), folder, resume=True, dataset=data),
        "b": lambda: fl.export_model(folder, place / "b.pt", best=True),
        "e": lambda: fl.export_model(folder, place / "e.pt"),
        "c": lambda: find_runs([folder]),
    }
    found = {}
    for reader, call in calls.items():
        try:
            call() if reader != "r" or "r" in told else None
        except fl.FLError as error:
            found[reader] = str(error)
    return found


ALIKE = {  # found by the same comparison as others
    (POINT, "another rate"), (POINT, "a bit of a checksum"), (POINT, "a bit of the header"), (TABLE, "another loss"),
    (TABLE, "a round below 1"), (TABLE, "no text"), (CLIENTS, "a table cut off"), (SETTINGS, "a word in a list"),
    (SETTINGS, "no text"), (POINT, "another version"), (POINT, "another method"), (TABLE, "another heading"),
    (TABLE, "other columns"), (TABLE, "half a gigabyte"), (CLIENTS, "nothing"), (START, "no file"),
    (SETTINGS, "an option that there is not"), (SETTINGS, "no file"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("file", "what"),
    some(DAMAGE, [case for case in DAMAGE if case not in ALIKE]),
    ids=[f"{file}: {what}" for file, what in DAMAGE],
)
def test_damage__whoever_reads_a_damaged_file_says_so(runs, tmp_path, data, file, what):
    damage, subject, told = DAMAGE[file, what]
    folder = shutil.copytree(runs[""], tmp_path / "runs" / "a")
    damage(folder / file, runs)
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.stat().st_size < 2**28}

    found = said_by_readers(folder, tmp_path, data, told)
    assert found.keys() == set(told), found
    for said in found.values():
        assert re.search(subject, said)
        assert str(folder) in said
        assert "\n" not in said
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(("file", "told"), [(POINT, "rbec"), (TABLE, "rbc"), (CLIENTS, "r"), (START, "r")])
def test_damage__a_file_that_may_not_be_read_is_not_called_missing(runs, tmp_path, data, monkeypatch, file, told):
    folder = shutil.copytree(runs[""], tmp_path / "runs" / "a")

    def closed(path, *args, opened=io.open, **kwargs):
        if path == folder / file:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr("io.open", closed)
    monkeypatch.setattr("builtins.open", closed)
    said = said_by_readers(folder, tmp_path, data, told)
    assert said.keys() == set(told)
    for text in said.values():
        assert re.search(rf"{file}.*Permission denied.*readable", text)
        assert "\n" not in text


def test_write__the_same_content_is_the_same_file_and_shared_memory_is_no_matter(tmp_path):
    one = torch.arange(6.0)
    mine = {"b": one, "a": one.view(2, 3).T, "c": torch.tensor(3), "d": torch.zeros(0, 2)}
    for name in "xy":
        tensors.write(tmp_path / name, "mine-1", mine, {"k": [1, None, 0.1]})
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
    found, header = tensors.read(tmp_path / "x", "mine-1")
    assert header == {"k": [1, None, 0.1]}
    assert found.keys() == mine.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in mine.items())


def test_export_model__what_a_kill_leaves_and_an_end_measured_is_no_damage(runs, tmp_path, data):
    """Rounds after the checkpoint, other seconds, and evaluations that a resumed run has dropped, may be; a table of
    clients that goes on behind them, too.
    """
    folder = shutil.copytree(runs[""], tmp_path / "a")
    change = lambda change: cells(change)(folder / TABLE, runs)  # noqa: E731
    change(lambda rows: [*rows, rows[3] | {"round": "5", "accuracy": "0.99"}])
    change(lambda rows: rows[0].update(seconds="7.5"))
    change(lambda rows: rows[3].update({name: "" for name in rows[3] if name.startswith(MEASURED)}))
    find_runs([folder])
    assert fl.export_model(folder, tmp_path / "b.pt", best=True).exists()
    assert simulate(replace(Config.read(folder), rounds=5), folder, True, data)["rounds"] == 5


def test_simulate__a_checkpoint_that_python_wrote_knows_no_settings_and_rows(tmp_path, data):
    """A run goes on after it; then only the table's headings can be wrong, which is told with the file."""
    folder = tmp_path / "a"
    simulate(CONFIG, folder, dataset=data)
    spec, server = checkpoint.read_parts(folder)
    server.pop("statistics", None)
    with fl_refused("name", "'statistics'"):
        checkpoint.save(folder, {**server, "statistics": {}}, 1, spec, {})
    checkpoint.save(folder, server, 1, spec, {})
    whole = (folder / TABLE).read_bytes()
    cells(renamed)(folder / TABLE, {})
    with fl_refused("file", "metrics.csv", "'acuracy'"):
        simulate(CONFIG, folder, resume=True, dataset=data)
    (folder / TABLE).write_bytes(whole)
    assert simulate(CONFIG, folder, resume=True, dataset=data)["rounds"] == 1


def test_simulate__a_resumed_run_keeps_to_the_backend_that_auto_chose(tmp_path, data, monkeypatch):
    used, order = [], ["vmap", "loop"]
    monkeypatch.setattr(engine, "rank_backends", lambda groups: order)
    for name in ("vmap", "loop"):
        real = engine.BACKENDS[name]
        monkeypatch.setitem(engine.BACKENDS, name, lambda groups, n=name, r=real: used.append(n) or r(groups))
    config, folder = CONFIG.replace(backend="auto"), tmp_path / "a"
    simulate(config, folder, dataset=data)
    order.reverse()  # as on a machine with other threads
    simulate(config.replace(rounds=2), folder, resume=True, dataset=data)
    simulate(config, tmp_path / "b", dataset=data)
    assert used == ["vmap", "vmap", "loop"]


@pytest.mark.parametrize(
    "change", [lambda part: part.popitem(), lambda part: part.update(extra=torch.zeros(1))], ids=["lost", "added"]
)
def test_simulate__a_checkpoint_with_other_tensors_than_the_methods_is_not_resumed(tmp_path, data, change):
    folder = tmp_path / "a"
    simulate(CONFIG, folder, dataset=data)
    spec, server = checkpoint.read_parts(folder)
    server.pop("statistics", None)
    change(server["global"])
    checkpoint.save(folder, server, 1, spec, {})
    with fl_refused("folder"):
        simulate(CONFIG, folder, resume=True, dataset=data)


@pytest.mark.parametrize("name", ["cnn", "timm:resnet18"])
def test_damage__fields_of_other_versions_do_not_matter_where_the_model_has_none(tmp_path, name):
    spec = make_spec(name, 10, 1, 8, width=0.5)
    checkpoint.save(tmp_path, {"global": {"a": torch.zeros(1)}}, 1, spec, {})
    assert checkpoint.read_parts(tmp_path)[0] == spec
    fields = asdict(spec) | {"layer_scale": None}
    assert checkpoint.spec_of(tmp_path, fields, None) == spec


def test_damage__a_model_of_another_version_is_said_to_be_one(tmp_path):
    checkpoint.save(tmp_path, {"global": {"a": torch.zeros(1)}}, 1, make_spec("cnn", 10, 1, 8), {})
    with patch.dict(PRESETS), fl_refused("file", "'cnn'"):  # which puts all back in its order
        del PRESETS["cnn"]
        checkpoint.read_parts(tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"attack": {"share": 0.5}}, {"attack": {"share": 0.0}}),
        ({}, {"attack": {"share": 0.5}}),
        ({}, {"compression": {"kind": "quantise"}}),
        ({"compression": {"kind": "quantise"}}, {"compression": {"bits": 4}}),
    ],
)
def test_simulate__a_run_does_not_go_on_with_other_extensions(before, after, tmp_path):
    config, folder = CONFIG.replace(rounds=1, **before), tmp_path / "run"
    simulate(config, folder)
    changed = config.replace(**after)
    with fl_refused("folder", "--"):
        simulate(changed.replace(rounds=2), folder, resume=True)
    (name,) = after
    flags = [word for one, value in after[name].items() for word in (f"--{name}.{one}", str(value))]
    with pytest.raises(fl.FLError, match=f"--{name}.* cannot change when a run is resumed"):
        parse(["--resume", str(folder), *flags])
    (folder / "config.yaml").write_text(changed.to_yaml())
    with fl_refused("folder", "--"):
        fl.load_model(folder)
