"""The commands that cut, deepen and mix checkpoints do what the functions do on models in memory."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from command_files import NETS, in_folder_with, refused, run, same
from safetensors.torch import load_file, save_file

import surgery
from surgery.__main__ import main
from surgery.commands import COMMANDS

MODULE = """
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(5, 6)

    def forward(self, x):
        return self.one(x).sort(-1).values @ torch.ones(6, 2)


def number():
    return 3


def broken():
    raise KeyError("missing")
"""


@pytest.fixture
def net(tmp_path, monkeypatch):
    in_folder_with(monkeypatch, tmp_path, "their_models", NETS + MODULE)
    import their_models

    torch.manual_seed(0)
    model = their_models.net()
    save_file(model.state_dict(), "net.safetensors")
    return model


GIVEN = ("--model", "their_models:net", "--input", "5")


def test_narrow__extract_embed(net):
    run("narrow", "net.safetensors", "--width", "0.5", *GIVEN, "--out", "small.safetensors", "--plan", "plan.json")
    small, plan = surgery.narrow(net, 0.5, torch.zeros(2, 5))
    same("small.safetensors", surgery.state(small))
    run("narrow", "net.safetensors", "--width", "0.5", "--rounding", "3", *GIVEN, "--out", "threes.safetensors")
    threes, _ = surgery.narrow(net, 0.5, torch.zeros(2, 5), rounding=3)
    same("threes.safetensors", surgery.state(threes))
    assert sum(p.numel() for p in threes.parameters()) > sum(p.numel() for p in small.parameters())
    run("extract", "net.safetensors", "--plan", "plan.json", "--out", "again.safetensors")
    same("again.safetensors", surgery.state(small))
    run("embed", "small.safetensors", "--plan", "plan.json", "--out", "zeros.safetensors")
    same("zeros.safetensors", plan.embed(surgery.state(small))[0])
    other = {name: tensor + 1 for name, tensor in surgery.state(net).items()}
    save_file(other, "other.safetensors")
    run("embed", "small.safetensors", "--plan", "plan.json", "--into", "other.safetensors", "--out", "full.safetensors")
    same("full.safetensors", plan.embed(surgery.state(small), into=other)[0])


@pytest.mark.slow
def test_prune__keeps_what_matters(net):
    run("prune", "net.safetensors", "--parameters", "0.5", *GIVEN, "--out", "small.safetensors")
    example = torch.zeros(2, 5)
    scores = surgery.pruning.importance(net, example=example, by="l1")
    target = surgery.pruning.Target(parameters=0.5)
    small = surgery.pruning.prune(net, target=target, importance=scores, example=example).model
    same("small.safetensors", surgery.state(small))
    options = ("--plan", "plan.json", "--steps", "3", "--parameters", "0.5")
    run("prune", "net.safetensors", *options, *GIVEN, "--out", "steps.safetensors")
    stepwise = surgery.pruning.prune(net, target=target, example=example, steps=3)
    same("steps.safetensors", surgery.state(stepwise.model))
    run("prune", "net.safetensors", "--positions", "0.5", *GIVEN, "--out", "half.safetensors")
    half = surgery.pruning.prune(net, target=surgery.pruning.Target(positions=0.5), example=example)
    same("half.safetensors", surgery.state(half.model))
    assert surgery.Plan.load("plan.json") == stepwise.plan


def test_prune__and_permute_take_a_criterion_of_ones_own(net, capsys, tmp_path):
    text = "def largest(name, rows, axis): return rows.abs().amax(1)\ndef nothing(model): pass\n"
    (tmp_path / "own_criteria.py").write_text(text)
    size = ("--positions", "0.5", "--importance")
    run("prune", "net.safetensors", *size, "own_criteria:largest", *GIVEN, "--out", "small.safetensors")
    options = {"example": torch.zeros(2, 5), "importance": lambda name, rows, axis: rows.abs().amax(1)}
    small = surgery.pruning.prune(net, target=surgery.pruning.Target(positions=0.5), **options).model
    same("small.safetensors", surgery.state(small))
    for name, word in {
        "l3": "bn_scale", "taylor": "Python", "own_criteria:nothing": "NoneType",
        "own_criteria:largst": "own_criteria:largest", "own_criteria.py:largest": ".py",
    }.items():  # fmt: skip
        assert word in refused(capsys, "prune", "net.safetensors", *size, name, *GIVEN, "--out", "no.safetensors")
    run("permute", "net.safetensors", "--by", "own_criteria:largest", *GIVEN, "--out", "sorted.safetensors")
    assert "--by l3" in refused(capsys, "permute", "net.safetensors", "--by", "l3", *GIVEN, "--out", "no.safetensors")


@pytest.mark.parametrize("model", [(), GIVEN], ids=["by names", "by model"])
def test_graft__and_ungraft(net, model):
    run("graft", "net.safetensors", "--depths", "5", *model, "--out", "deep.safetensors", "--plan", "deep.json")
    same("deep.safetensors", surgery.state(surgery.graft(net, depths=[5], example=torch.zeros(2, 5))[0]))
    run("ungraft", "net.safetensors", "--keep", "2", *model, "--out", "shallow.safetensors", "--plan", "shallow.json")
    same("shallow.safetensors", surgery.state(surgery.ungraft(net, keep=[2], example=torch.zeros(2, 5))[0]))
    both = surgery.Plan.load("deep.json").compose(surgery.Plan.load("shallow.json"))
    both.save("both.json")
    run("extract", "deep.safetensors", "--plan", "both.json", "--out", "both.safetensors")
    same("both.safetensors", load_file("shallow.safetensors"))


def test_operations__check_says_what_works_and_why_not(net, capsys):
    assert main(["check", "their_models:net,width=6", "--input", "5"]) == 0
    text = capsys.readouterr().out
    assert text.count("yes ") == 4
    assert "every hidden width shrinks to 0.5" in text
    assert "1 section gets a block more, and loses it again" in text
    assert main(["check", "their_models:Odd", "--input", "5"]) == 1
    text = capsys.readouterr().out
    assert "NO  narrow: " in text
    assert "nothing to do" in text
    assert main(["check", "their_models:net"]) == 1
    assert "give the shape of one input as --input" in capsys.readouterr().out


def test_write__a_wrong_input_or_number_of_classes_says_what_to_give(net, capsys):
    def said(*arguments):
        return refused(capsys, "narrow", "two.safetensors", "--width", "0.5", "--out", "o.safetensors", *arguments)

    import their_models

    surgery.files.write("two.safetensors", surgery.state(their_models.net(classes=2)))
    text = said("--model", "their_models:net", "--input", "5")
    assert "two.safetensors has '2.bias' of shape (2,), and their_models:net of (3,)" in text
    assert "give the --model that it was saved from, with its arguments" in text
    model = "their_models:net,classes=2"
    assert "--input" in said("--model", model)
    assert "--input 1,3,64 is one input without the batch" in said("--model", model, "--input", "1,3,64")
    assert "and their_models:net,width=6 of (" in said("--model", "their_models:net,width=6")


BART = {"layers": 1, "attention_heads": 2, "ffn_dim": 12}


@pytest.mark.parametrize("kind", ["T5", pytest.param("Bart", marks=pytest.mark.slow)])
def test_narrow__folders_of_encoders_with_decoders_need_no_input(kind, tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    sizes = {
        "T5": {"d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2},
        "Bart": {
            **{f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in BART.items()},
            "max_position_embeddings": 16,
        },
    }[kind]
    config = getattr(transformers, f"{kind}Config")(vocab_size=20, d_model=8, **sizes)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    model.save_pretrained("big")
    run("narrow", "big", "--width", "0.5", "--out", "small")
    small = type(model).from_pretrained("small")
    assert small.config.d_model == 4
    ids = torch.tensor([[3, 5, 1]])
    example = {"input_ids": ids, "decoder_input_ids": ids}
    expected, _ = surgery.narrow(model, 0.5, example, output=lambda found: found.logits)
    assert torch.allclose(small(**example).logits, expected(**example).logits, atol=1e-6)


@pytest.mark.slow
def test_operations__a_folder_of_transformers_is_a_model_with_its_configuration(tmp_path, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.LlamaConfig(vocab_size=30, tie_word_embeddings=True, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained("full")
    run("ungraft", "full", "--keep", "2", "--out", "shallow")
    run("narrow", "full", "--width", "0.5", "--out", "small")
    capsys.readouterr()
    error = refused(capsys, "prune", "full", "--parameters", "0.6", "--out", "pruned")
    assert "no config.json describes the result" in error
    assert "so that from_pretrained would refuse it: give a file, --out NAME.safetensors" in error
    assert "prune has --even, --heads and --rounding" in error
    run("prune", "full", "--parameters", "0.6", "--even", "--heads", "drop", "--rounding", "2", "--out", "even")
    run("prune", "full", "--parameters", "0.6", "--out", "pruned.safetensors")
    full = transformers.LlamaForCausalLM.from_pretrained("full")
    example, target = (
        {"input_ids": torch.ones(2, 8, dtype=torch.long)},
        surgery.pruning.Target(parameters=0.6, even=True),
    )
    for folder, expected in [
        ("shallow", surgery.ungraft(full, keep=[2], example=example)[0]),
        ("small", surgery.narrow(full, 0.5, example)[0]),
        ("even", surgery.pruning.prune(full, target=target, heads="drop", rounding=2, example=example)[0]),
    ]:
        found = transformers.LlamaForCausalLM.from_pretrained(folder)
        assert found.config.num_hidden_layers == expected.config.num_hidden_layers
        torch.testing.assert_close(found.eval()(**example).logits, expected.eval()(**example).logits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mixtral", "ViT"])
def test_ungraft__files_whose_tensors_transformers_renames_or_joins_are_read_as_it_does(kind, tmp_path, monkeypatch):
    """On disk there is a tensor for each expert, or the names of earlier versions."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    if kind == "ViT":
        config = transformers.ViTConfig(image_size=16, patch_size=4, **sizes)
        build, example = transformers.ViTForImageClassification, {"pixel_values": torch.randn(2, 3, 16, 16)}
    else:
        config = transformers.MixtralConfig(vocab_size=30, num_key_value_heads=2, num_local_experts=4, **sizes)
        build, example = transformers.MixtralForCausalLM, {"input_ids": torch.arange(16).view(2, 8)}
    full = build(config).eval()
    full.save_pretrained("full")
    run("narrow", "full", "--width", "0.5", "--out", "small")
    run("ungraft", "full", "--keep", "1", "--out", "shallow")
    for folder, expected in [
        ("small", surgery.narrow(full, 0.5, example)[0]),
        ("shallow", surgery.ungraft(full, keep=[1], example=example)[0]),
    ]:
        found = build.from_pretrained(folder).eval()
        torch.testing.assert_close(found(**example).logits, expected.eval()(**example).logits)


def test_operations__what_cannot_be_done_is_one_line(net, capsys, tmp_path):
    file, out = "net.safetensors", ("--out", "out.safetensors")
    (tmp_path / "bad.json").write_text("{}")
    run("ungraft", file, "--keep", "2", "--out", "shallow.safetensors", "--plan", "plan.json")
    capsys.readouterr()
    other = ("--model", "their_models:net,width=4", "--input", "5")
    for arguments, text in [
        (("narrow", file, "--width", "0.5", *other, *out), "of shape"),
        (("narrow", file, "--width", "0.5", "--model", "their_models:number", *out), "their_models:number"),
        (("narrow", file, "--width", "0.5", "--model", "their_models:broken", *out), "'missing'"),
        (("narrow", file, "--width", "0.5", "--model", "their_models:Odd", *out), "'one.weight'"),
        (("narrow", file, "--width", "0.5", "--model", "their_models:net,3", *out), "NAME=VALUE"),
        (("narrow", file, "--width", "0.5", "--model", "net", *out), "'net'"),
        (("prune", file, *GIVEN, *out), "--macs"),
        (("prune", file, "--macs", "0.5", "--parameters", "0.5", *GIVEN, *out), "--macs"),
        (("ungraft", file, "--keep", "1,2", *out), "2 depths"),
        (("extract", "shallow.safetensors", "--plan", "plan.json", *out), "plan"),
        (("extract", file, "--plan", "bad.json", *out), "bad.json: "),
        (("check", "their_models:net", "--width", "2"), "--width 2"),
    ]:  # fmt: skip
        assert text in refused(capsys, *arguments), arguments
    assert json.loads((tmp_path / "plan.json").read_text())
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.slow
def test_operations__files_that_are_not_as_they_should_be_are_one_line(net, capsys, tmp_path):
    file, out = "net.safetensors", ("--out", "out.safetensors")
    torch.save(net.state_dict(), "net.pt")
    data = bytearray((tmp_path / "net.pt").read_bytes())
    data[data.index(net[0].weight.detach().numpy().tobytes()) + 3] ^= 4
    (tmp_path / "flipped.pt").write_bytes(data)
    save_file({**net.state_dict(), "0.bias": torch.full((8,), torch.inf)}, "inf.safetensors")
    (tmp_path / "there.safetensors").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text('{"architectures": ')
    save_file(net.state_dict(), "bad/model.safetensors")
    irregular = []
    for end in (".safetensors", ".png", ".json"):
        os.mkfifo(f"pipe{end}")
        os.symlink("/dev/null", f"null{end}")
        os.symlink("nowhere", f"dangling{end}")
        (tmp_path / f"folder{end}").mkdir()
        irregular += [f"{name}{end}" for name in ("pipe", "null", "dangling", "folder")]
    before = sorted(tmp_path.rglob("*"))
    cases = [(("merge", "linear", file, "inf.safetensors", *out), "'0.bias' of inf.safetensors")]
    merges = ("merge", "ties", file, file, "--base", "flipped.pt"), ("average", "flipped.pt", file)
    narrow, graft = ("narrow", "flipped.pt", "--width", "0.5", *GIVEN), ("graft", "flipped.pt", "--depths", "4")
    for command in (*((*one, *out) for one in (*merges, narrow, graft)), ("inspect", "flipped.pt")):
        cases.append((command, "flipped.pt"))
    cases.append((("narrow", "bad", "--width", "0.5", *out), "bad/config.json"))
    graft, pictures = ("graft", file, "--depths", "4"), ("inspect", "torchvision:resnet18", "--plot")
    for name in irregular:
        command = {".json": (*graft, *out, "--plan"), ".png": pictures}.get(name[name.index(".") :], (*graft, "--out"))
        cases.append(((*command, name), name))
    for name in ("there.safetensors", "full", ".", "", "/"):
        cases.append(((*graft, "--out", name), name or "."))
    for name in (".", "", "/"):
        cases.append(((*pictures, name), ".png"))
        cases.append(((*graft, *out, "--plan", name), name or "."))
    for arguments, text in cases:
        said = refused(capsys, *arguments)
        assert text in said, arguments
        assert "--model" not in said
    assert sorted(tmp_path.rglob("*")) == before


def test_operations__what_cannot_be_so_is_told_by_its_flag(net, capsys):
    file, out = "net.safetensors", ("--out", "out.safetensors")
    for arguments, text in [
        (("merge", "slerp", file, file, "--set", "t=2"), "t=2"),
        (("narrow", file, "--width", "2", *GIVEN), "--width 2"),
        (("narrow", file, "--width", "0.5"), "--model"),
        (("narrow", file, "--width", "0.5", "--model", "their_models:net", "--input", "0"), "--input 0"),
        (("prune", file, "--macs", "3", *GIVEN), "--macs 3"),
        (("prune", file, "--macs", "0.5", "--steps", "0", *GIVEN), "--steps 0"),
        (("prune", file, "--macs", "0.5", "--model", "nowhere:net"), "nowhere:net"),
        (("widen", file, "--rate", "2", "--seed", "-1", *GIVEN), "--seed -1"),
        (("widen", file, "--rate", "2", "--seed", str(2**70), *GIVEN), "--seed"),
        (("graft", file, "--depths", "1"), "ungraft"),
        (("align", file, "--to", file, "--by", "activations", *GIVEN), "--data"),
        (("align", file, "--to", file, "--data", "a:b", *GIVEN), "--data"),
        (("extract", file, "--plan", "none.json"), "none.json"),
    ]:
        assert text in refused(capsys, *arguments, *out)


def test_operations__an_existing_file_is_told_before_the_work(net, capsys, monkeypatch):
    file = "net.safetensors"
    save_file({}, "there.safetensors")
    monkeypatch.setattr("surgery.commands.checkpoint.open_state", lambda path: pytest.fail("it worked in vain"))
    for command in [
        ("narrow", file, "--width", "0.5", *GIVEN),
        ("align", file, "--to", file, *GIVEN),
        ("merge", "greedy_soup", file, "--score", "their_models:number"),
    ]:
        assert "there.safetensors" in refused(capsys, *command, "--out", "there.safetensors")
    command = ("narrow", file, "--width", "0.5", *GIVEN, "--out", "new.safetensors", "--plan", file)
    assert file in refused(capsys, *command)


def test_operations__a_plan_at_the_place_of_its_checkpoint_is_refused(net, capsys):
    refused(capsys, "ungraft", "net.safetensors", "--keep", "1", "--out", "new.pt", "--plan", "new.pt")
    assert torch.load("new.pt", weights_only=True).keys() <= net.state_dict().keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_operations__help_of_a_command_is_readable_in_80_columns(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines() if not line.startswith("usage:")) <= 80
    assert "default: None" not in text


def test_operations__an_empty_folder_is_written_to(net, tmp_path):
    (tmp_path / "empty").mkdir()
    run("average", "net.safetensors", "net.safetensors", "--out", "empty")
    same("empty/model.safetensors", net.state_dict())


SLOW = """
import sys, time
from surgery import __main__, files

def slow(path, *others):
    path.write_text("half")
    print("writing", flush=True)
    time.sleep(60)

files.writing._safetensors = slow
sys.exit(__main__.main(["average", "net.safetensors", "--out", sys.argv[1]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "out"), [(signal.SIGINT, "new"), (signal.SIGTERM, "new.safetensors"), (signal.SIGKILL, "new")]
)
def test_operations__what_a_command_that_is_stopped_had_written_is_deleted(net, tmp_path, caplog, out, sent):
    before = sorted(os.listdir())
    with subprocess.Popen([sys.executable, "-c", SLOW, out], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "writing\n"
        there = {name for name in os.listdir() if name not in before}
        child.send_signal(sent)
        code = child.wait()
    assert len(there) == 1
    if sent == signal.SIGKILL:
        assert there <= set(os.listdir())
        others = [name.replace(str(child.pid), str(os.getppid())) for name in there]  # one who still writes
        others += [name.replace("@", "@not-") for name in there] + [".mine.tmp"]  # another host's, and no such thing
        for name in others:
            (tmp_path / name).write_text("")
        run("average", "net.safetensors", "--out", "other.safetensors")
        assert f"deleted {there.pop()}, which a command that was killed had left" in caplog.text
        assert caplog.text.count("deleted") == 1
        assert sorted(os.listdir()) == sorted([*before, *others, "other.safetensors"])
    else:
        assert code == 128 + sent
        assert sorted(os.listdir()) == before
