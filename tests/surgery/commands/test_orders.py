"""`permute`, `align` and `widen` on files do what the functions do in memory, and are undone."""

import json

import pytest
import torch
from command_files import NETS, in_folder_with, refused, run, same
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import surgery
from surgery import merging

MODULE = """
class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 6), nn.Linear(6, 2)
        self.scale = torch.arange(6.0)

    def forward(self, x):
        return self.two(self.one(x) * self.scale)


def batches():
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(16, 5, generator=draw) for _ in range(2)]


def pairs():
    return [(x, x.argmax(1) % 3) for x in batches()]


def near_two(model):
    return -abs(model[0].bias[0].item() - 2) if isinstance(model, nn.Module) else -abs(model["0.bias"][0].item() - 2)


def nothing():
    return 3


def tied():
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    model[3].weight = model[1].weight
    return model
"""
X = torch.zeros(2, 5)
MODEL = ("--model", "their_orders:net,blocks=2", "--input", "5")


@pytest.fixture
def nets(tmp_path, monkeypatch):
    in_folder_with(monkeypatch, tmp_path, "their_orders", NETS + MODULE)
    import their_orders

    torch.manual_seed(0)
    found = [their_orders.net(blocks=2) for _ in range(2)]
    for name, net in zip("ab", found):
        save_file(net.state_dict(), f"{name}.safetensors")
    return found


def test_permute__by_a_file_and_back(nets, tmp_path):
    orders = {"0.weight:0": [2, 0, 1, 3, 7, 5, 6, 4], "1.0.a.weight:0": [*range(1, 12), 0]}
    (tmp_path / "orders.json").write_text(json.dumps(orders))
    given = ("--permutations", "orders.json", *MODEL)
    run("permute", "a.safetensors", *given, "--out", "b1.safetensors", "--plan", "p.json")
    same("b1.safetensors", surgery.state(surgery.symmetry.permute(nets[0], orders, example=X)[0]))
    run("permute", "b1.safetensors", *given, "--inverse", "--out", "back.safetensors")
    same("back.safetensors", surgery.state(nets[0]))
    run("permute", "b1.safetensors", "--permutations", "p.json", "--inverse", "--out", "by_plan.safetensors")
    same("by_plan.safetensors", surgery.state(nets[0]))
    run("permute", "a.safetensors", "--permutations", "p.json", "--out", "again.safetensors")
    same("again.safetensors", load_file("b1.safetensors"))
    with safe_open("b1.safetensors", "pt") as file:
        made = json.loads(file.metadata()["layer_surgery"])
    assert (made["do"], made["permutations"]) == ("permute", "orders.json")
    assert made["inputs"]["model"]["path"] == "a.safetensors"


def test_orders__sort_by_puts_the_important_positions_first(nets):
    run("permute", "a.safetensors", "--by", "l1", *MODEL, "--out", "sorted.safetensors", "--plan", "p.json")
    scores = surgery.pruning.importance(nets[0], example=X, by="l1")
    same("sorted.safetensors", surgery.state(surgery.symmetry.permute(nets[0], by=scores, example=X)[0]))
    run("permute", "sorted.safetensors", "--permutations", "p.json", "--inverse", "--out", "back.safetensors")
    same("back.safetensors", surgery.state(nets[0]))


def test_align__finds_a_permuted_copy(nets, tmp_path):
    orders = {"0.weight:0": [2, 0, 1, 3, 7, 5, 6, 4], "1.1.a.weight:0": [*range(1, 12), 0]}
    copy, _ = surgery.symmetry.permute(nets[0], orders, example=X)
    save_file(copy.state_dict(), "copy.safetensors")
    for by in [(), ("--by", "activations", "--data", "their_orders:batches")]:
        out, plan = f"aligned{len(by)}.safetensors", f"{len(by)}.json"
        run("align", "copy.safetensors", "--to", "a.safetensors", *by, *MODEL, "--out", out, "--plan", plan)
        same(out, surgery.state(nets[0]))
        run("permute", out, "--permutations", plan, "--inverse", "--out", f"back-{out}")
        same(f"back-{out}", surgery.state(copy))
    run("align", "b.safetensors", "--to", "a.safetensors", *MODEL, "--out", "other.safetensors")
    same("other.safetensors", surgery.state(surgery.symmetry.align(nets, example=X).models[1]))


def test_orders__a_width_that_a_checkpoint_does_not_hold_whole_keeps_its_order(nets, caplog):
    import their_orders

    for seed in range(2):
        torch.manual_seed(seed)
        save_file(their_orders.Kept().state_dict(), f"kept{seed}.safetensors")
    given = ("--model", "their_orders:Kept", "--input", "5", "--out")
    run("permute", "kept0.safetensors", "--by", "l1", *given, "sorted.safetensors")
    assert "scale" in caplog.text
    same("sorted.safetensors", load_file("kept0.safetensors"))
    run("align", "kept1.safetensors", "--to", "kept0.safetensors", *given, "aligned.safetensors")
    same("aligned.safetensors", load_file("kept1.safetensors"))


def test_widen__and_the_old_model_in_it(nets):
    half = {name: tensor.bfloat16() for name, tensor in load_file("a.safetensors").items()}
    save_file(half, "half.safetensors")
    run("widen", "a.safetensors", "--rate", "2", *MODEL, "--out", "wide.safetensors")
    same("wide.safetensors", surgery.state(surgery.widening.widen(nets[0], rate=2, example=X)[0]))
    zero = ("--mode", "zero", "--noise", "0.1", "--seed", "3", "--plan", "p.json")
    run("widen", "half.safetensors", "--rate", "2", *MODEL, *zero, "--out", "zero.safetensors")
    assert load_file("zero.safetensors")["0.weight"].dtype is torch.bfloat16
    run("extract", "zero.safetensors", "--plan", "p.json", "--out", "old.safetensors")
    same("old.safetensors", half)


def test_orders__merges_that_are_measured(nets, capsys):
    import their_orders

    files = ("a.safetensors", "b.safetensors")
    fishers = [merging.fisher_information(net.eval(), their_orders.pairs()) for net in nets]
    run("merge", "fisher", *files, *MODEL, "--data", "their_orders:pairs", "--out", "fisher.safetensors")
    same("fisher.safetensors", merging.fisher([surgery.state(n) for n in nets], fishers=fishers))
    grams = [merging.input_grams(net, their_orders.batches()) for net in nets]
    given = ("--data", "their_orders:batches", "--set", "alpha=0.5")
    run("merge", "regmean", *files, *MODEL, *given, "--out", "regmean.safetensors")
    same("regmean.safetensors", merging.regmean([surgery.state(n) for n in nets], grams=grams, alpha=0.5))
    soup = merging.greedy_soup([surgery.state(n) for n in nets], score=their_orders.near_two).state
    for k, model in enumerate([MODEL, ()]):
        run("merge", "greedy_soup", *files, *model, "--score", "their_orders:near_two", "--out", f"{k}.safetensors")
        same(f"{k}.safetensors", soup)


def test_orders__what_cannot_be_done_is_one_line(nets, capsys, tmp_path):
    import their_orders

    save_file(their_orders.Kept().state_dict(), "kept.safetensors")
    (tmp_path / "short.json").write_text('{"0.weight:0": [1, 0]}')
    (tmp_path / "kept.json").write_text('{"one.weight:0": [1, 0, 2, 3, 4, 5]}')
    (tmp_path / "list.json").write_text("[1]")
    run("narrow", "a.safetensors", "--width", "0.5", *MODEL, "--out", "small.safetensors", "--plan", "narrow.json")
    capsys.readouterr()
    a, out = "a.safetensors", ("--out", "out.safetensors")
    kept = ("--model", "their_orders:Kept", "--input", "5")
    for arguments, text in [
        (("permute", a, *MODEL, *out), "--permutations"),
        (("permute", a, "--by", "l1", *out), "--model"),
        (("permute", a, "--by", "l1", "--inverse", *MODEL, *out), "--inverse"),
        (("permute", a, "--permutations", "short.json", *MODEL, *out), "short.json"),
        (("permute", a, "--permutations", "list.json", *MODEL, *out), "list.json"),
        (("permute", a, "--permutations", "none.json", *MODEL, *out), "none.json"),
        (("permute", a, "--permutations", "narrow.json", *out), "'0.weight'"),
        (("permute", "kept.safetensors", "--permutations", "kept.json", *kept, *out), "'scale'"),
        (("align", a, "--to", "small.safetensors", *MODEL, *out), "small.safetensors"),
        (("align", a, "--to", a, "--by", "activations", "--data", "their_orders:nothing", *MODEL, *out),
         "their_orders:nothing"),
        (("widen", a, "--rate", "1", *MODEL, *out), "rate"),
        (("merge", "fisher", a, a, *MODEL, *out), "--data"),
        (("merge", "fisher", a, a, "--data", "their_orders:pairs", *out), "--model"),
        (("merge", "fisher", a, a, "--data", "their_orders:batches", *MODEL, *out), "their_orders:batches"),
        (("merge", "greedy_soup", a, a, *out), "--score"),
        (("merge", "greedy_soup", a, a, "--score", "their_orders:none", *out), "their_orders:none"),
        (("merge", "greedy_soup", a, a, "--score", "their_orders:nothing", *out), "their_orders:nothing"),
        (("merge", "ties", a, a, "--base", a, "--set", "normalize='false'", *out), "normalize"),
        (("merge", "linear", a, a, "--set", "normalize=0", *out), "normalize"),
    ]:  # fmt: skip
        said = refused(capsys, *arguments)
        assert text in said, said
    assert not (tmp_path / "out.safetensors").exists()


def test_narrow__a_file_with_other_numbers_where_the_model_has_one_tensor_is_refused(nets, capsys):
    import their_orders

    values = {name: tensor.clone() for name, tensor in their_orders.tied().state_dict().items()}
    given = ("--width", "0.5", "--model", "their_orders:tied", "--input", "5", "--out")
    save_file(values, "equal.safetensors")
    run("narrow", "equal.safetensors", *given, "narrow.safetensors")
    assert "3.weight" not in load_file("narrow.safetensors")
    save_file(values | {"3.weight": values["3.weight"] + 1}, "unequal.safetensors")
    message = refused(capsys, "narrow", "unequal.safetensors", *given, "never.safetensors")
    assert "'3.weight'" in message
    assert "'1.weight'" in message
