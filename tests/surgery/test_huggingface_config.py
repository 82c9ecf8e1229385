"""A model that its class makes from a configuration: after surgery the configuration says what the model is."""

import copy
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from selection import some
from torch import nn

import surgery
from benchmarks import zeros
from surgery.transformers.settings import attribute_edits, holder_of, make_from
from tests.surgery import test_huggingface_depth as families


class Config:
    """Widths of `Net`. As of many libraries, some follow from others when it is made or read."""

    def __init__(self, hidden_size=32, inner=None, num_heads=4, rope=None, depth=1, labels=32, groups=(20, 12)):
        self.hidden_size, self.inner, self.num_heads, self.depth = hidden_size, inner, num_heads, depth
        self.rope = rope or {}
        self.labels = labels  # as many as channels, but no width
        self.largest_size = 32  # like a width in name and number, but none
        self.head = SimpleNamespace(channels=list(groups))
        self.head_dim = hidden_size // num_heads
        if hidden_size % num_heads:
            raise ValueError(f"{hidden_size} channels do not divide into {num_heads} heads")

    def to_dict(self):
        return copy.deepcopy({**vars(self), "head": self.head.channels})

    @classmethod
    def from_dict(cls, values):
        groups = values["head"]
        return cls(
            **{key: value for key, value in values.items() if key not in ("head", "head_dim", "largest_size")},
            groups=groups,
        )


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.num_heads = config, config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)
        inner = config.inner or 3 * config.hidden_size
        self.up, self.down = nn.Linear(config.hidden_size, inner), nn.Linear(inner, config.hidden_size)

    def forward(self, x, rotation):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        if rotation is not None:
            q, k = rotated(q, rotation), rotated(k, rotation)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


def rotated(x, angle):
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Net(nn.Module):
    """A transformer, with rotary embeddings if it is told so, that runs as many blocks as its configuration says."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.stem = nn.Linear(3, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        a, b = config.head.channels
        self.head = nn.Sequential(nn.Linear(config.hidden_size, a), nn.ReLU(), nn.Linear(a, b), nn.ReLU())
        self.last = nn.Linear(b, config.labels)
        if config.rope:
            half = config.head_dim // 2
            frequencies = config.rope["base"] ** (-torch.arange(half) / half)
            self.register_buffer("unused", frequencies, persistent=False)
            self.register_buffer("frequencies", frequencies.clone(), persistent=False)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)[:, None]
        rotation = places * self.frequencies if self.config.rope else None
        x = self.stem(x)
        for block in self.blocks[: self.config.depth]:
            x = block(x, rotation)
        return self.last(self.head(x))


EXAMPLE = torch.zeros(2, 5, 3)


def net(**values):
    torch.manual_seed(0)
    return Net(Config(**values)).eval()


def reloaded(small):
    """What its class makes of the saved configuration and the state."""
    made = type(small)(Config.from_dict(small.config.to_dict())).eval()
    made.load_state_dict(small.state_dict(), strict=True)
    return made


def check_same(small):
    """The model equals the reloaded one on an input of another length."""
    x = torch.randn(3, 7, 3)
    torch.testing.assert_close(reloaded(small)(x), small(x))


@pytest.mark.parametrize(("heads", "kept"), [("inside", 4), ("drop", 2)])
def test_narrow__the_configuration_says_the_new_widths(heads, kept):
    model = net(inner=40)
    before, drawn = model.config.to_dict(), torch.get_rng_state()
    small, plan = surgery.narrow(model, 0.5, EXAMPLE, heads=heads)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert model.config.to_dict() == before
    assert small.config is small.blocks[0].config
    assert small.config is not model.config
    assert small.config.to_dict() == {
        **before,
        "hidden_size": 16,
        "inner": 20,
        "num_heads": kept,
        "head_dim": 16 // kept,
        "head": [10, 6],
    }
    check_same(small)
    again = surgery.Plan.from_json(plan.to_json()).build(model)
    assert again.config.to_dict() == small.config.to_dict()


class Scaled(nn.Module):
    """Computes with a width of its configuration."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.a, self.b = nn.Linear(3, config.hidden_size), nn.Linear(config.hidden_size, 2)

    def forward(self, x):
        return self.b(self.a(x).relu()) / self.config.hidden_size


class Looking(Net):
    """Looks at numbers, so that it is followed where it is, and not on the meta device."""

    def forward(self, x):
        return super().forward(x if x.isfinite().all() else x.nan_to_num())


def test_huggingface_config__a_model_made_for_its_shapes_draws_its_buffers_and_no_parameters():
    class Noisy(nn.Linear):
        def __init__(self, config):
            super().__init__(3, config.hidden_size)
            self.register_buffer("noise", nn.init.normal_(torch.zeros(3)))

    made = make_from(Noisy, Config())
    assert made.weight.is_meta
    assert made.noise.all()


@pytest.mark.parametrize("kind", [Net, Looking])
def test_widen__a_wide_model_is_what_its_configuration_says(kind):
    torch.manual_seed(0)
    model, x = kind(Config()).eval(), torch.randn(2, 5, 3)
    wide, _ = surgery.widening.widen(model, rate=2, example=x)
    torch.testing.assert_close(wide(x), model(x))
    assert (wide.config.hidden_size, wide.config.num_heads) == (64, 8)
    check_same(wide)


def test_widen__a_width_with_which_code_computes_does_not_grow():
    with refused("width"):
        surgery.widening.widen(Scaled(Config()), rate=2, example=torch.randn(5, 3))


def test_narrow__a_width_that_was_a_multiple_becomes_a_number():
    small, _ = surgery.narrow(net(), {"blocks.*.up": 0.5}, EXAMPLE)
    assert (small.config.hidden_size, small.config.inner) == (32, 48)
    check_same(small)


def test_narrow__a_shorter_rotation_gets_another_base():
    """Frequencies are base ** (-i / n): the first half of n is the whole of n / 2 with the root of the base."""
    small, _ = surgery.narrow(net(rope={"base": 10000.0}), 0.5, EXAMPLE)
    assert small.config.rope == {"base": pytest.approx(100.0)}
    assert len(small.frequencies) == len(small.unused) == 2
    check_same(small)


class Stages(nn.Module):
    """Reads a width from its configuration while it runs; has a norm where two widths differ."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        a, b = config.inner, config.hidden_size
        self.stem = nn.Linear(3, a)
        self.body = nn.Linear(a, b)
        self.shortcut = nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b)) if a != b else nn.Identity()
        self.last = nn.Linear(b, 5)

    def forward(self, x):
        x = self.stem(x)
        x = self.shortcut(x) + self.body(x).relu()
        return self.last(x.reshape(-1, self.config.hidden_size))


def test_narrow__a_width_that_code_reads_from_the_configuration_is_changed_there():
    torch.manual_seed(0)
    model = Stages(Config(inner=12, hidden_size=8)).eval()
    small, plan = surgery.narrow(model, 0.5, torch.zeros(2, 3))
    assert (small.config.inner, small.config.hidden_size) == (6, 4)
    assert (model.config.inner, model.config.hidden_size) == (12, 8)
    full = surgery.load(copy.deepcopy(model), plan.embed(surgery.state(small))[0])
    x = torch.randn(4, 3)
    torch.testing.assert_close(reloaded(small)(x), small(x))
    torch.testing.assert_close(full(x), small(x))


class Guarded(Config):
    """Raises for a value that, it says, differs between layers, as transformers' do."""

    def __getattribute__(self, name):
        if name == "largest_size":
            raise RuntimeError("ask the layer for it")
        return super().__getattribute__(name)


def test_narrow__values_that_a_configuration_does_not_give_are_left_alone():
    small, _ = surgery.narrow(Net(Guarded()).eval(), 0.5, EXAMPLE)
    assert (small.config.hidden_size, vars(small.config)["largest_size"]) == (16, 32)
    check_same(small)


def test_narrow__a_configuration_whose_guessed_widths_make_other_modules_is_logged(caplog):
    """Both widths become 8, for which the class makes no shortcut: a norm's counter has no axis and is missing."""
    model = Stages(Config(inner=12, hidden_size=8)).eval()
    small, _ = surgery.narrow(model, {"stem": 8 / 12}, torch.zeros(2, 3))
    assert small.stem.weight.shape == (8, 3)
    assert "does not describe it" in caplog.text


def test_prune__a_target_without_scores_keeps_one_share_which_the_class_can_say(caplog):
    """With scores the blocks get widths of their own, which it cannot."""
    model, target = net(inner=40), surgery.pruning.Target(macs=0.6)
    small, _ = surgery.pruning.prune(model, target=target, importance=None, example=EXAMPLE, heads="drop")[:2]
    check_same(small)
    assert not caplog.records
    surgery.pruning.prune(model, target=target, example=EXAMPLE)
    assert "does not describe it" in caplog.text


@pytest.mark.parametrize(("steps", "share"), some(product([1, 3], [0.4, 0.6, 0.8]), [(1, 0.6)]))
def test_prune__even_widths_are_what_the_class_can_say(share, steps, caplog):
    """A hidden width that is heads times their size is that of the narrow ones, too."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 30, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    target, words = (
        surgery.pruning.Target(parameters=share, even=True),
        {"input_ids": torch.ones(2, 8, dtype=torch.long)},
    )
    bert = transformers.BertForMaskedLM(transformers.BertConfig(intermediate_size=256, **sizes))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=96, **sizes))
    for net, heads in [(bert, "inside"), (bert, "drop"), (llama, "drop")]:
        for parameter in net.parameters():
            nn.init.normal_(parameter, 0, 0.3)
        small, _, _ = surgery.pruning.prune(net.eval(), target=target, example=words, heads=heads, steps=steps)
        assert small.config.hidden_size == small.get_input_embeddings().weight.shape[1] < 64
    assert "does not describe it" not in caplog.text


def test_narrow__what_its_class_cannot_say_is_logged_and_the_configuration_stays(caplog):
    model = net()
    small, _ = surgery.narrow(model, 0.5, EXAMPLE, keep=["stem"])
    assert small.config.to_dict() == model.config.to_dict()
    assert len(caplog.records) == 1
    assert "blocks.0.qkv.weight is (48, 32) here and (96, 32)" in caplog.text
    assert "Plan.build" in caplog.text
    with pytest.raises(RuntimeError, match="size mismatch"):
        reloaded(small)


def test_narrow__a_cut_tensor_that_its_class_does_not_save_is_named(caplog):
    """As Marian's sinusoids, which are computed anew for the new width when it is loaded."""
    model = net()
    model._keys_to_ignore_on_save = {"stem.weight"}
    small, _ = surgery.narrow(model, 0.5, EXAMPLE)
    assert small.config.to_dict() == model.config.to_dict()
    assert "does not save stem.weight, and computes another one" in caplog.text
    assert "keep=['stem']" in caplog.text


def test_narrow__why_its_class_refuses_the_widths_is_told(caplog):
    surgery.narrow(net(), 0.3, EXAMPLE)
    assert "its class raises ValueError: 10 channels do not divide into 4 heads" in caplog.text


def test_narrow__the_field_that_its_class_refuses_is_told_from_the_second_line(caplog):
    """transformers' configurations say which one only there."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=20, num_hidden_layers=1, **sizes)).eval()
    words = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
    surgery.narrow(model, 0.8, words, output=lambda y: y.logits)
    assert "The hidden size (26) is not a multiple of the number of attention heads (4)" in caplog.text


def test_narrow__a_model_that_its_configuration_did_not_describe_is_named(caplog):
    model = net()
    model.last = nn.Linear(12, 7)
    small, _ = surgery.narrow(model, 0.5, EXAMPLE)
    assert small.last.weight.shape == (7, 6)
    assert "nor the full model: last.weight is (7, 12) here and (32, 12)" in caplog.text


class Rows(nn.Sequential):
    """A table whose length, and an output whose size, happen to be those of widths."""

    def __init__(self, config):
        mlp = nn.Sequential(nn.Linear(config.hidden_size, config.inner_size), nn.ReLU())
        last = nn.Linear(config.inner_size, config.output_size)
        super().__init__(nn.Embedding(config.table_size, config.hidden_size), mlp, last)
        self.config = config


def test_narrow__a_number_that_only_happens_to_be_that_of_a_width_stays(monkeypatch, caplog):
    monkeypatch.setattr("surgery.transformers.width._MOST_MADE", 1)  # found without trying one value after the other
    config = SimpleNamespace(table_size=32, hidden_size=32, inner_size=32, output_size=32)
    small, _ = surgery.narrow(Rows(config), 0.5, torch.zeros(2, 5, dtype=torch.int64))
    assert vars(small.config) == {"table_size": 32, "hidden_size": 16, "inner_size": 16, "output_size": 32}
    assert not caplog.records


def test_huggingface_config__only_a_class_that_takes_the_configuration_alone_is_called():
    class Two(nn.Linear):
        def __init__(self, config, more):
            super().__init__(config.width, 2)
            self.config = config

    class Frozen(nn.Linear):
        def __init__(self, config):
            super().__init__(*config, 2)
            self.config = config

    assert holder_of(Two(SimpleNamespace(width=3), 1)) is None
    assert holder_of(Frozen([3])) is None
    assert holder_of(nn.Linear(3, 2)) is None
    assert holder_of(net()) == "config"


def holding(value, *modules):
    model = nn.Sequential(*modules)
    model.own = value
    return model


@pytest.mark.parametrize(
    ("mine", "made", "values"),
    [
        (holding(8), holding(4), {"own": 4}),
        (holding(8), holding(8), {}),
        (holding([8, 2]), holding([4, 2]), {"own": [4, 2]}),
        (
            holding(SimpleNamespace(a=SimpleNamespace(b=8))),
            holding(SimpleNamespace(a=SimpleNamespace(b=4))),
            {"own.a.b": 4},
        ),
        (holding(8), holding("8"), None),  # of another kind
        (holding(8), holding(len), None),  # no edit carries a function
        (holding(SimpleNamespace(a=8)), holding(SimpleNamespace(a="8")), None),
        (holding(8, nn.ReLU()), holding(4, nn.GELU()), None),
        (holding(8, nn.ReLU()), holding(4), None),
        (holding(8), holding(4, nn.ReLU()), None),
    ],
)
def test_huggingface_config__edits_give_a_model_the_attributes_of_another(mine, made, values):
    edits = attribute_edits(mine, made)
    assert (edits if edits is None else {edit["attribute"]: edit["value"] for edit in edits}) == values


def test_huggingface_config__an_object_that_several_modules_hold_is_edited_once_even_if_it_holds_itself():
    one, other = SimpleNamespace(width=8), SimpleNamespace(width=4)
    one.same, other.same = one, other
    edits = attribute_edits(holding(one, holding(one)), holding(other, holding(other)))
    assert edits == [{"do": "set", "module": "", "attribute": "own.width", "value": 4}]


@pytest.mark.slow
def test_huggingface_config__depth_and_width_together(caplog):
    deeper, _ = surgery.graft(net(depth=2), depths=[4], example=EXAMPLE)
    small, _ = surgery.narrow(deeper, 0.5, EXAMPLE)
    assert (small.config.depth, small.config.hidden_size) == (4, 16)
    check_same(deeper)
    check_same(small)
    shallow, _ = surgery.ungraft(deeper, keep=[3], example=EXAMPLE)
    check_same(shallow)
    assert not caplog.records


def test_graft__a_depth_that_the_configuration_cannot_say_is_logged(caplog, monkeypatch):
    class Alternating(Net):
        def __init__(self, config):
            super().__init__(config)
            for place, block in enumerate(self.blocks):
                block.shift = place % 2

    torch.manual_seed(0)
    surgery.graft(Alternating(Config(depth=2)).eval(), depths=[3], example=EXAMPLE)
    assert "blocks.2.shift is 1 here and 0" in caplog.text
    caplog.clear()
    monkeypatch.setitem(surgery.depth.sections.BLOCKS, type(net().blocks[0]), None)
    surgery.graft(net(depth=2), depths=[3])
    assert "blocks.1.0.qkv.weight" in caplog.text
    assert "give example=" in caplog.text


def test_ungraft__a_configuration_that_is_lost_is_logged_though_a_number_differed_before(caplog, monkeypatch):
    model = net(depth=3)
    monkeypatch.setitem(surgery.depth.sections.BLOCKS, type(model.blocks[0]), None)
    model.blocks[0].num_heads = 2
    surgery.ungraft(model, keep=[2])
    assert "blocks.2.qkv.weight is missing here" in caplog.text


class Named(Config):
    """A configuration that names blocks, and does not read names of blocks that there are not."""

    def __init__(self, depth=1, used="block0", **others):
        super().__init__(depth=depth, **others)
        self.used = used
        if int(used.removeprefix("block")) >= depth:
            raise ValueError(f"{used} is not one of {depth} blocks")


def test_ungraft__a_configuration_that_cannot_be_read_again_is_logged(caplog):
    model = Net(Named(depth=3, used="block2")).eval()
    surgery.ungraft(model, keep=[2], example=EXAMPLE)
    assert "its class raises ValueError for it: block2 is not one of 2 blocks" in caplog.text


WORDS = torch.arange(14).reshape(2, 7) + 3


DEEPSEEK = {  # the vocabulary is as large as a width, and there are as many experts as channels of the rotation
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128},
    **{"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
}


@pytest.mark.slow
def test_narrow__numbers_of_a_configuration_that_coincide_are_told_apart(caplog):
    transformers = pytest.importorskip("transformers")
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**DEEPSEEK)).eval()
    small, _ = surgery.narrow(model, 0.5, {"input_ids": WORDS}, output=lambda y: y.logits)
    assert (small.config.vocab_size, small.config.n_routed_experts, small.config.q_lora_rank) == (64, 8, 12)
    read = type(model)(small.config).eval()
    read.load_state_dict(small.state_dict())
    torch.testing.assert_close(read(WORDS).logits, small(WORDS).logits)
    assert "does not describe it" not in caplog.text


def check_saved(model, example, folder):
    """What is saved and read again gives the same outputs, also for other inputs, and the same words."""
    model.save_pretrained(folder)
    read = type(model).from_pretrained(folder).eval()
    others = {"input_ids": torch.randint(3, 60, (3, 9)), "attention_mask": torch.arange(9).expand(3, 9) < 7}
    inputs = [example]
    if "input_ids" in example:
        inputs.append({**{key: value[:1].expand(3, -1) for key, value in example.items()}, **others})
    else:
        inputs.append({"pixel_values": torch.randn(3, 3, 32, 32)})
    with torch.no_grad():
        for given in inputs:
            torch.testing.assert_close(read(**given).logits, model(**given).logits)
    if model.can_generate():
        plain = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        words = [m.generate(WORDS, use_cache=cache, **plain) for m in (model, read) for cache in (True, False)]
        assert all(torch.equal(found, words[0]) for found in words)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2", "bert", "vit", "t5"])
def test_huggingface_config__a_saved_small_model_is_read_by_transformers(family, tmp_path, caplog):
    model, example, _ = families.make(family)
    with torch.no_grad():  # norms and biases begin as ones and zeros, which hides errors
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    before = model.config.to_dict()
    for heads in ("inside", "drop"):
        small, _ = surgery.narrow(model, 0.5, example, output=lambda y: y.logits, heads=heads)
        assert small.config.to_dict() != before
        check_saved(small.eval(), example, tmp_path / heads)
    depths = {section.name: 5 for section in surgery.sections(model)}
    deeper, _ = surgery.graft(model, depths=depths, example=example)
    check_saved(deeper.eval(), example, tmp_path / "deeper")
    shallow, _ = surgery.ungraft(model, keep=dict.fromkeys(depths, 2), example=example)
    check_saved(shallow.eval(), example, tmp_path / "shallow")
    small, _ = surgery.narrow(deeper, 0.5, example, output=lambda y: y.logits)
    check_saved(small.eval(), example, tmp_path / "both")
    assert model.config.to_dict() == before
    assert not [record for record in caplog.records if record.name.startswith("surgery")]


@pytest.mark.slow
def test_narrow__transformers_refuses_what_the_configuration_cannot_say(tmp_path, caplog):
    """BERT's heads share its hidden width, which stays whole, since it is an output."""
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig(**families.TEXT)).eval()
    small, plan = surgery.narrow(model, 0.5, {"input_ids": WORDS})
    assert small.config.to_dict() == model.config.to_dict()
    assert "query.weight is (8, 16) here and (16, 16)" in caplog.text
    small.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        transformers.BertModel.from_pretrained(tmp_path)
    again = surgery.load(plan.build(transformers.BertModel(model.config)), surgery.state(small))
    out = small(WORDS).pooler_output
    torch.testing.assert_close(again.eval()(WORDS).pooler_output, out)


FEW = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.slow
def test_narrow__the_part_of_a_head_that_turns_shrinks_apart_from_the_rest(caplog):
    """Two of eight positions turn, by one angle, and stay; the others are halved, in all layers alike."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoXConfig(**FEW, intermediate_size=48, rotary_pct=0.25)
    model, example = transformers.GPTNeoXForCausalLM(config).eval().double(), {"input_ids": torch.arange(18).view(2, 9)}
    small, plan = surgery.narrow(model, 0.5, example, output=lambda y: y.logits)
    assert len(caplog.records) == 1  # the configuration has one share for all of a head
    with refused("strict"):
        surgery.narrow(model, 0.5, example, output=lambda y: y.logits, strict=True)
    for layer in small.gpt_neox.layers:
        assert layer.attention.query_key_value.out_features == 4 * 3 * (2 + 3)
    assert zeros.agrees(model, small, plan, example, lambda y: y.logits) == (True, "")


@pytest.mark.slow
def test_narrow__an_attention_whose_heads_share_keys_shrinks():
    """Falcon's second decoder was refused: its sizes were not found among numbers that are equal by chance."""
    transformers = pytest.importorskip("transformers")
    config = transformers.FalconConfig(**FEW, new_decoder_architecture=True, num_kv_heads=2)
    model, example = transformers.FalconForCausalLM(config).eval(), {"input_ids": torch.arange(18).view(2, 9)}
    small, _ = surgery.narrow(model, 0.5, example, output=lambda y: y.logits, strict=True)
    assert small.config.hidden_size == 16
    again = transformers.FalconForCausalLM(small.config).eval()
    again.load_state_dict(small.state_dict())
    torch.testing.assert_close(again(**example).logits, small.eval()(**example).logits)
