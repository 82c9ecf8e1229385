"""States in files: what is read and written is what the safetensors library and torch.load read and write."""

import contextlib
import errno
import json
import os
import random
import resource
import socket
import struct
import types
import zipfile

import pytest
import torch
from refusals import refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from surgery import SurgeryError, lazy, merging
from surgery.files import open_state, write
from surgery.lazy import LazyState, Pieces


def state():
    draw = torch.Generator().manual_seed(0)
    return {
        "a.bias": torch.randn(7, generator=draw),
        "a.weight": torch.randn(5, 9, generator=draw).T,
        "half": torch.randn(3, generator=draw).bfloat16(),
        "eight": torch.randn(3, generator=draw).to(torch.float8_e4m3fn),
        "flag": torch.tensor([True, False, True]),
        "steps": torch.tensor(2**40),
        "double": torch.randn(2, 2, generator=draw).double(),
        "none": torch.zeros(0, 4),
    }


def same(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def contiguous(values):
    return {name: tensor.contiguous() for name, tensor in values.items()}


@pytest.fixture(params=[None, 2], ids=["whole", "slabs"])
def slabs(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(lazy, "SLAB", request.param)


def test_open_state__what_the_library_writes_is_read(tmp_path, slabs):
    save_file(contiguous(state()), tmp_path / "a.safetensors", metadata={"by": "me"})
    found = open_state(tmp_path / "a.safetensors")
    same(found, state())
    assert found.metadata == {"by": "me"}
    assert "8 tensors" in repr(found)


def test_write__what_is_written_is_read_by_the_library(tmp_path, slabs):
    seen = []
    write(tmp_path / "a.safetensors", state(), metadata={"by": "me"}, progress=seen.append)
    same(load_file(tmp_path / "a.safetensors"), state())
    assert sum(seen) == sum(t.nbytes for t in state().values())
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "by": "me"}
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "wrap", [lambda s: s, lambda s: {"model": {f"module.{n}": t for n, t in s.items()}, "epoch": 3}]
)
def test_files__of_torch_save(tmp_path, zipped, wrap):
    values = {name: t for name, t in state().items() if zipped or name != "eight"}  # which the old format cannot hold
    torch.save(wrap(values), tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    same(open_state(tmp_path / "a.pth"), values)
    write(tmp_path / "b.pt", open_state(tmp_path / "a.pth"))
    same(torch.load(tmp_path / "b.pt", weights_only=True), values)


def test_files__shards_and_the_files_beside_them(tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    save_file(contiguous(state()), old / "model.safetensors")
    (old / "config.json").write_text('{"hidden_size": 9}')
    (old / "tokenizer.txt").write_text("words")
    (old / "pytorch_model.bin").write_text("old weights, which are not copied")
    source = open_state(old)
    write(tmp_path / "new", source, like=source, shard_bytes=200, config={"hidden_size": 4})
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    shards = [name for name in names if name.startswith("model-")]
    assert len(shards) > 1
    assert set(names) - set(shards) == {"config.json", "tokenizer.txt", "model.safetensors.index.json"}
    found = {name: tensor for shard in shards for name, tensor in load_file(tmp_path / "new" / shard).items()}
    same(found, state())
    same(open_state(tmp_path / "new"), state())
    same(open_state(tmp_path / "new" / "model.safetensors.index.json"), state())
    assert json.loads((tmp_path / "new/config.json").read_text()) == {"hidden_size": 4}
    write(tmp_path / "one", source)
    same(load_file(tmp_path / "one" / "model.safetensors"), state())
    pair = {"a": torch.ones(20), "b": torch.ones(30)}
    write(tmp_path / "pair", pair, shard_bytes=200)  # as many bytes as there are
    same(load_file(tmp_path / "pair" / "model.safetensors"), pair)


def test_open_state__a_folder_has_the_file_that_transformers_reads(tmp_path):
    old, new = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    torch.save(old, tmp_path / "pytorch_model-00001-of-00001.bin")
    for name, shard in (
        ("pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"),
        ("model.safetensors.index.json", "model-00001-of-00001.safetensors"),
    ):
        (tmp_path / name).write_text(json.dumps({"weight_map": {"w": shard}}))
    save_file(old, tmp_path / "model-00001-of-00001.safetensors")
    save_file(new, tmp_path / "model.safetensors")
    same(open_state(tmp_path), new)
    assert open_state(tmp_path).files == (tmp_path / "model.safetensors",)


@pytest.mark.slow
def test_files__transformers_reads_what_is_written(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=30
    )
    for name in "ab":
        transformers.BertModel(config).save_pretrained(tmp_path / name)
    a, b = open_state(tmp_path / "a"), open_state(tmp_path / "b")
    write(tmp_path / "mean", merging.linear([a, b]), like=a, shard_bytes=3000)
    found = transformers.BertModel.from_pretrained(tmp_path / "mean").state_dict()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, (a[name] + b[name]) / 2)


def safetensors_bytes(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = {
    "empty": b"",
    "a header longer than the file": safetensors_bytes({}, length=10**9),
    "no JSON": safetensors_bytes(b"{nonsense"),
    "nested": safetensors_bytes(b"[" * 100_000),
    "twice": safetensors_bytes(b'{"w":%b,"w":%b}' % ((json.dumps(ONE).encode(),) * 2), bytes(8)),
    "sizes that overflow": safetensors_bytes({"w": ONE | {"shape": [2**40, 2**40]}}, bytes(8)),
    "another size than the shape": safetensors_bytes({"w": ONE | {"shape": [3]}}, bytes(8)),
    "an end beyond the file": safetensors_bytes({"w": ONE}, bytes(4)),
    "an end before that of the file": safetensors_bytes({"w": ONE}, bytes(12)),
    "a hole": safetensors_bytes({"w": ONE, "v": ONE | {"data_offsets": [12, 20]}}, bytes(20)),
    "an unknown dtype": safetensors_bytes({"w": ONE | {"dtype": "F31"}}, bytes(8)),
    "a dtype that is not read": safetensors_bytes({"w": ONE | {"dtype": "F8_E8M0", "shape": [8]}}, bytes(8)),
    "metadata of numbers": safetensors_bytes({"__metadata__": {"a": 1}, "w": ONE}, bytes(8)),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_open_state__a_damaged_file_is_one_line(tmp_path, case):
    path = tmp_path / "w.safetensors"
    path.write_bytes(DAMAGED[case])
    with pytest.raises(SurgeryError) as caught:
        open_state(path)
    assert caught.value.code in ("file", "unsupported")
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 200


def test_open_state__any_changed_byte_of_a_header_is_an_error_or_another_state(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(3, 2), "v": torch.zeros(5)}, path)
    good = path.read_bytes()
    same(open_state(path), load_file(path))
    draw = random.Random(0)
    for _ in range(100):
        data = bytearray(good)
        data[draw.randrange(len(good) - 44)] = draw.randrange(256)
        path.write_bytes(data)
        with contextlib.suppress(SurgeryError):  # and no other error
            found = open_state(path)
            for name in found:
                found[name]


def test_open_state__a_file_that_runs_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"w": Evil()}, tmp_path / "evil.pt")
    with refused("file: evil.pt"):
        open_state(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def index(**places):
    return json.dumps({"weight_map": places}).encode()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("none.pt", None, "file: there"),
        (".", None, "file: model.safetensors"),
        ("net.onnx", b"", "file"),
        ("text.pt", b"no zip file", "file: text.pt"),
        ("empty.pth", b"", "file: empty.pth"),
        ("half.bin", b"\x80\x02", "file"),
        ("junk.pt", b"\x80\x02e.", "file"),
        ("pickle.pt", b"\x80\x02K\x01.", "file"),
        ("mixed.pt", {"w": torch.ones(3), "epoch": 2}, "file: 'epoch'"),
        ("list.pt", [1], "file"),
        ("sparse.pt", {"w": torch.eye(2).to_sparse()}, "unsupported: 'w'"),
        ("a.index.json", index(w="../a.safetensors"), "file"),
        ("e.index.json", index(w=""), "file: 'w'"),
        ("f.index.json", index(w=".."), "file: 'w'"),
        ("g.index.json", index(w="."), "file"),
        ("h.index.json", index(w="none.pt"), "file"),
        ("b.index.json", b'{"weights": 3}', "file"),
        ("c.index.json", index(w="good.pt"), "file: 'w'"),
    ],
)
def test_open_state__what_is_no_checkpoint_is_named(tmp_path, name, content, expected):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    if name.startswith("c"):
        torch.save({"v": torch.ones(1)}, tmp_path / "good.pt")
    with refused(expected):
        open_state(tmp_path / name)


@pytest.mark.parametrize(
    "records",
    [
        [],
        ["read.me"],
        ["a/b", "c/d"],
        ["net/version"],
        ["net/data.pkl", "net/data/0"],
        ["up/net/data.pkl", "up/version"],
    ],
)
def test_open_state__a_zip_file_without_the_records_of_torch_save_is_no_checkpoint(tmp_path, records):
    with zipfile.ZipFile(tmp_path / "net.pt", "w") as archive:
        for record in records:
            archive.writestr(record, b"5")
    with refused("file: net.pt"):
        open_state(tmp_path / "net.pt")


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "a"])
def test_write__what_fails_on_the_way_leaves_nothing(tmp_path, name):
    def failing(start, stop):
        raise SurgeryError("no more", code="file")

    values = LazyState({"v": Pieces.of(torch.ones(9)), "w": Pieces((9,), torch.float32, failing)})
    with refused("file"):
        write(tmp_path / name, values)
    assert not [*tmp_path.iterdir()]


def test_write__where_nothing_can_be_written(tmp_path, monkeypatch):
    one = {"w": torch.ones(1)}
    (tmp_path / "there.pt").write_text("x")
    for name, expected in [("there.pt", "file"), ("a.onnx", "file"), ("none/a.pt", "file: there"), ("x" * 300, "file")]:
        with refused(expected):
            write(tmp_path / name, one)
    sparse, meta = torch.eye(2).to_sparse(), torch.ones(2, device="meta")
    for name in ("d.pt", "d.safetensors", "d"):
        for tensor, expected in ((sparse, "unsupported: 'w'"), (meta, "values: 'w'")):
            with refused(expected):
                write(tmp_path / name, {"w": tensor})
    with refused("unsupported"):
        write(tmp_path / "c.safetensors", {"w": torch.ones(1).to(torch.float8_e8m0fnu)})
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=3))
    with refused("file"):
        write(tmp_path / "full.pt", one)
    assert [path.name for path in tmp_path.iterdir()] == ["there.pt"]


@pytest.mark.parametrize("name", ["net.pt", "net.bin", "net.safetensors", "net"])
@pytest.mark.parametrize("room", [100, 2000, 100_000, 399_900])
def test_write__a_disk_that_becomes_full_is_one_line_and_leaves_nothing(tmp_path, name, room):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with refused("file", name) as caught:
            write(tmp_path / name, {"v": torch.ones(5), "w": torch.ones(10**5)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["net.pt", "net.safetensors"])
def test_write__a_folder_that_is_closed_is_one_line(tmp_path, monkeypatch, name):
    def closed(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("builtins.open", closed)
    with refused("file", name) as caught:
        write(tmp_path / name, {"w": torch.ones(3)})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["net.pt", "net.safetensors"])
def test_write__the_same_state_is_the_same_file(tmp_path, name):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "a" / name, state())
    write(tmp_path / "b" / f"other{name}", state())
    content = (tmp_path / "a" / name).read_bytes()
    assert content == (tmp_path / "b" / f"other{name}").read_bytes()
    assert not any(text.encode() in content for text in (f".{os.getpid()}@", f"@{socket.gethostname()}"))


def test_write__a_conjugate_view_is_written_as_its_values(tmp_path):
    values = {"w": torch.tensor([1 + 2j, 3 - 4j]).conj()}
    write(tmp_path / "a.safetensors", values)
    same(load_file(tmp_path / "a.safetensors"), {"w": torch.tensor([1 - 2j, 3 + 4j])})


def test_open_state__a_file_that_shrinks_is_named(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(100)}, path)
    found = open_state(path)
    with open(path, "rb+") as file:
        file.truncate(120)
    with refused("file"):
        found["w"]


@pytest.mark.parametrize("where", ["data", "pickle", "end"])
def test_open_state__a_damaged_file_of_torch_save_is_one_plain_line(tmp_path, where):
    path = tmp_path / "net.pt"
    torch.save({"w": torch.full((1000,), 0.1)}, path)
    good = path.read_bytes()
    at = good.index(torch.tensor(0.1).numpy().tobytes() * 9) + 2000 if where == "data" else good.index(b"torch")
    flipped = good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
    path.write_bytes(good[:-500] if where == "end" else flipped)
    with refused("file: net.pt") as caught:
        open_state(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_open_state__a_compressed_record_is_refused_before_it_is_unpacked(tmp_path, monkeypatch, kind):
    torch.save({"w": torch.ones(3)}, tmp_path / "net.pt")
    with zipfile.ZipFile(tmp_path / "net.pt", "a") as archive:
        archive.writestr("net/more", bytes(10**6), compress_type=kind)
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("a record is read"))
    with refused("file: 'net/more'"):
        open_state(tmp_path / "net.pt")


def test_open_state__records_that_lie_in_the_same_bytes_are_refused(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "net.pt")
    with zipfile.ZipFile(tmp_path / "net.pt", "a") as archive:
        archive.writestr("net/more", bytes(10**4))
        archive.filelist += [archive.getinfo("net/more")] * 9
    with refused("file"):
        open_state(tmp_path / "net.pt")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(2**40),
        torch.zeros(2**8).expand(2**30, 2**8),
        torch.zeros(2**16).as_strided((2**15, 2**15), (1, 1)),
        torch.zeros(1, dtype=torch.bool).expand(2**20, 2**20),
    ],
    ids=["one number", "a row", "windows", "bool"],
)
def test_open_state__a_tensor_that_claims_more_than_its_file_holds_is_named(tmp_path, tensor, zipped):
    torch.save({"v": torch.ones(3), "w": tensor}, tmp_path / "net.pt", _use_new_zipfile_serialization=zipped)
    with refused("file"):
        open_state(tmp_path / "net.pt")
    small = {"w": torch.arange(3.0).expand(5, 3)}
    torch.save(small, tmp_path / "net.pt", _use_new_zipfile_serialization=zipped)
    same(open_state(tmp_path / "net.pt"), small)


def test_open_state__a_file_that_was_saved_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3)}, tmp_path / "net.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    same(open_state(tmp_path / "net.pt"), {"w": torch.ones(3)})
