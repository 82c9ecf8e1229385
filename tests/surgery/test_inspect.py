import copy
import io
import json
import signal
import time

import pytest
import torch
from refusals import refused
from selection import some
from symmetric import SMALL
from torch import nn

from surgery import state
from surgery.__main__ import main, run
from surgery.inspect.describe import describe
from surgery.inspect.draw import bars, in_rows, list_coupled
from surgery.inspect.report import Steps, count_macs, report_of
from surgery.libraries import make_model

RESNET = ["inspect", "torchvision:resnet18", "--input", "3,32,32"]


def facts(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    return json.loads(printed)


def by_hand(model):
    """Multiply-accumulates of convolutions and linear layers: an output element takes a row of the weight."""
    counts = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(lambda m, _, out: counts.append(out.numel() * m.weight[0].numel()))
    model.eval()(torch.zeros(1, 3, 32, 32))
    return sum(counts)


def test_inspect__json_agrees_with_counting(capsys):
    model = make_model("torchvision:resnet18")
    found = facts(capsys, *RESNET)
    assert found["after"] is None
    assert found["before"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["before"]["state_bytes"] == sum(t.numel() * t.element_size() for t in state(model).values())
    assert found["before"]["macs"] == count_macs(model, torch.zeros(1, 3, 32, 32)) == by_hand(model)
    shapes = {
        f"{row['before']['name']}.{tensor}": tuple(shape)
        for row in found["layers"]
        for tensor, shape in row["before"]["shapes"].items()
    }
    assert shapes == {name: tuple(tensor.shape) for name, tensor in state(model).items()}
    sections = [{"name": f"layer{i}", "kind": "BasicBlock", "blocks": [f"layer{i}.0", f"layer{i}.1"], "after": 2}
                for i in (1, 2, 3, 4)]  # fmt: skip
    assert found["sections"] == sections


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        (RESNET, ["--width", "0.5"]),
        (RESNET, ["--depth", "1,2,1,2"]),
        (RESNET, ["--depth", "2,4,1,3", "--width", "0.25"]),
        (["inspect", "timm:test_vit"], ["--depth", "2", "--width", "0.5", "--heads", "drop"]),
        pytest.param(
            ["inspect", "torchvision:mobilenet_v2", "--input", "3,32,32"],
            ["--depth", "1,1,4,1,3,2,1"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_inspect__the_shapes_after_add_up_to_the_parameters_after(capsys, model, flags):
    """Every tensor of the new model is in exactly one row, though blocks are dropped, repeated and renumbered."""
    found = facts(capsys, *model, *flags)
    names, total = [], 0
    for row in found["layers"]:
        for place in row["after"]:
            for tensor, shape in place["shapes"].items():
                names.append(f"{place['name']}.{tensor}")
                total += 0 if "running" in tensor or "tracked" in tensor else torch.Size(shape).numel()
    assert len(set(names)) == len(names)
    assert total == found["after"]["parameters"]
    assert found["after"]["fingerprint"] != found["before"]["fingerprint"]


@pytest.mark.slow
def test_inspect__the_text_tells_sections_widths_and_sizes_within_100_columns(capsys):
    assert main([*RESNET, "--width", "0.5", "--depth", "1,2,3,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "  layer1  2 -> 1 blocks  BasicBlock" in lines
    assert "  layer2  2 blocks  BasicBlock" in lines
    assert "    block 1  dropped" in lines
    assert "    block 1  repeated 1 more time" in lines
    assert any(line.split() == ["fc", "Linear", "1000x512", "->", "1000x256"] for line in lines)
    assert any("3 x" in line and "layer3.*.conv1.weight:0" in line for line in lines)
    assert any(line.startswith("parameters   11,689,512") for line in lines)


@pytest.mark.slow
def test_inspect__equal_blocks_are_listed_once(capsys):
    assert main(["inspect", "timm:test_vit"]) == 0
    assert "alike" in capsys.readouterr().out


def test_inspect__a_model_that_does_not_run_still_shows_its_layers(capsys):
    assert main(["inspect", "timm:test_vit", "--input", "3,100,100"]) == 0
    printed = capsys.readouterr().out
    assert "mlp.fc1" in printed
    assert "note: the model does not run on 3x100x100" in printed


def test_inspect__a_model_without_sections_is_described():
    text = describe(report_of(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), shape=[2]))
    assert "0  Linear  3x2" in text


def test_inspect__attention_is_counted_in_both_libraries():
    """Heads of 16 over 4 + 1 tokens: the products of queries, keys and values are operations, too."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    expected = 5 * (4 * 32 * 32 + 2 * 32 * 64) + 2 * 5 * 5 * 32
    assert count_macs(layer, torch.zeros(1, 5, 32)) == expected
    assert layer.training


@pytest.mark.slow
@pytest.mark.parametrize("suffix", some(["png", "svg", "pdf"], ["svg"]))
@pytest.mark.drawn
def test_inspect__pictures_are_written(tmp_path, capsys, suffix):
    file = tmp_path / f"model.{suffix}"
    assert main([*RESNET, "--width", "0.5", "--depth", "1,2,3,2", "--plot", str(file)]) == 0
    assert file.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml", b"%PDF-")
    assert file.stat().st_size > 5000
    assert f"saved the picture as {file}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspct"], "did you mean 'inspect'?"),
        (["inspect", "timm:resnet1"], "did you mean timm:resnet"),
        (["inspect", "resnet18"], "give timm:NAME, torchvision:NAME"),
        ([*RESNET, "--width", "1.5"], "--width 1.5: give a share"),
        ([*RESNET, "--depth", "1,2"], "the model has 4"),
        ([*RESNET, "--depth", "1,2,0,1"], "keep at least 1"),
        ([*RESNET, "--plot", "model.bmp"], "pictures can be saved as .png, .svg, .pdf"),
        ([*RESNET, "--plot", "no/such/folder/model.png"], "there is no folder no/such/folder"),
        ([*RESNET, "--seconds", "0"], "--seconds 0: give more than 0"),
        ([*RESNET, "--seconds", "1e-6"], "building torchvision:resnet18 took more than 1e-06 s"),
        ([*RESNET, "--input", "3,0,32"], "--input 3,0,32"),
        ([*RESNET[:2], "--input", "1,32,32", "--width", "0.5"], "does not run on 1x32x32"),
    ],
)
def test_inspect__what_cannot_be_done_is_one_line(capsys, arguments, message):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("flag", "given"), [("depth", "2,,2"), ("input", "3,x")])
def test_inspect__what_is_no_list_of_numbers_is_refused(flag, given):
    with refused(f"argument: --{flag} INT,...", repr(given)):
        run(RESNET[0], [*RESNET[1:], f"--{flag}", given])


def test_inspect__help(capsys):
    assert main([]) == main(["--help"]) == 0
    assert "python -m surgery inspect torchvision:resnet50" in capsys.readouterr().out
    assert main(["inspect", "--help"]) == 0
    assert "\n  --plot FILE " in capsys.readouterr().out


class Slow(nn.Module):
    """Computes for as long as it is let."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(2, 3)

    def forward(self, x):
        while True:
            x = x + self.block.weight.sum()


def test_inspect__a_step_that_takes_too_long_is_stopped_and_named_and_the_rest_is_shown():
    begin = time.monotonic()
    report = report_of(Slow(), shape=[2], steps=Steps(seconds=0.1))
    assert time.monotonic() - begin < 60
    assert report.stopped == ("counting operations", "following the widths")
    text = describe(report)
    assert "block  Linear  3x2" in text
    assert "note: stopped for taking too long: counting operations, following the widths; --seconds" in text
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


class Deleted:
    """Python drops what a handler of signals raises here."""

    def __del__(self):
        time.sleep(0.3)


def test_steps__a_step_is_stopped_although_python_drops_the_first_attempt(monkeypatch):
    dropped = []
    monkeypatch.setattr("sys.unraisablehook", dropped.append)

    def step():
        Deleted()
        time.sleep(60)

    steps, begin = Steps(seconds=0.1), time.monotonic()
    assert steps("slow", step) is None
    assert time.monotonic() - begin < 30
    assert len(dropped) == 1
    assert steps.stopped == ["slow"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_inspect__nothing_is_narrowed_at_a_depth_that_was_not_asked_for(monkeypatch):
    monkeypatch.setattr("surgery.inspect.report._at_depth", lambda *_: time.sleep(5))
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net = nn.Sequential(nn.Linear(2, 4), block, copy.deepcopy(block), nn.Linear(4, 2))
    report = report_of(net, width=0.5, depth=[1], shape=[2], steps=Steps(seconds=0.3))
    assert "changing the depth" in report.stopped  # on a busy machine counting may stop as well
    assert report.after is None
    assert report.sections[0].after == 2


def test_inspect__steps_are_shown_on_a_terminal_only():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    file, terminal = io.StringIO(), Terminal()
    for stream in (file, terminal):
        report_of(nn.Linear(2, 3), width=1, shape=[2], steps=Steps(stream=stream))
    assert file.getvalue() == ""
    shown = [text for text in terminal.getvalue().split("\r\x1b[K") if text]
    assert shown == [
        f"{step} ..." for step in ("counting operations", "following the widths", "narrowing", "counting operations")
    ]


def test_inspect__operations_are_counted_without_computing():
    net = nn.Sequential(nn.Conv2d(1, 256, 1), *(nn.Conv2d(256, 256, 5, padding=2) for _ in range(4)))  # minutes, if run
    report = report_of(net, shape=[1, 2048, 2048])
    assert report.before.macs == 2048 * 2048 * (256 + 4 * 256 * 256 * 25)


@pytest.mark.parametrize(
    ("net", "rows", "drawn"),
    [  # a residual stream is one line and an inner width another; heads and what is inside them are two
        ("residual", [1, 1], {(("stem", "conv2"), ("conv1", "head")), (("conv1",), ("conv2",))}),
        (
            "attention",
            [1, 2, 1],
            {(("embed", "proj", "down"), ("qkv", "up", "head")), (("qkv",), ("proj",)), (("up",), ("down",))},
        ),
    ],
)
def test_inspect__the_picture_has_a_line_for_each_coupled_width(net, rows, drawn):
    report = report_of(SMALL[net](), shape=(3, 6, 6))
    names = [bar.name for bar in bars(report)]
    found = list_coupled(report, names, dict.fromkeys(names, 0))
    assert {(tuple(names[i] for i in one.makes), tuple(names[i] for i in one.reads)) for one in found} == drawn
    assert [len(row) for row in in_rows(found)] == rows
