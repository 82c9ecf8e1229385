"""Files of peft, both ways."""

import json

import pytest
import torch
from refusals import refused
from torch import nn

import surgery
from surgery import adapters
from tests.surgery.adapters.test_model import IMAGE, drawn, network


def test_peft__a_folder_is_read_as_it_was_written(tmp_path):
    net = network().eval()
    adapted = drawn(adapters.add(net, 2, modules=["0"], train=["4"], scale=0.7, dropout=0.25))
    nn.init.ones_(adapted[4].weight)
    adapters.write_peft(adapted, tmp_path / "adapter", task_type="FEATURE_EXTRACTION")
    again = adapters.read_peft(net, tmp_path / "adapter").eval()
    assert torch.equal(again(IMAGE), adapted(IMAGE))
    assert str(again) == str(adapted)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (2, 1.4, "FEATURE_EXTRACTION")
    assert config["modules_to_save"] == ["4"]


def test_peft__ranks_and_scales_of_their_own_are_written(tmp_path):
    net = network().eval()
    tensors, _ = adapters.resize(adapters.state(drawn(adapters.add(net, 2))), {"0": 1, "4": 3})
    adapted = adapters.attach(net, tensors, scale={"0": 2.0, "4": 0.5})
    adapters.write_peft(adapted, tmp_path / "adapter")
    again = adapters.read_peft(net, tmp_path / "adapter")
    assert adapters.scales(again) == {"0": 2.0, "4": 0.5}
    assert torch.equal(again(IMAGE), adapted(IMAGE))


def test_peft__statistics_that_move_in_training_are_in_the_file_of_norms_that_are_trained(tmp_path, caplog):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double().eval()
    adapters.write_peft(adapters.add(net, 2), tmp_path / "without")
    assert "statistics of 1" in caplog.text
    caplog.clear()
    adapted = drawn(adapters.add(net, 2, train=["1"])).train()
    for _ in range(20):
        adapted(3 + torch.randn(8, 4, dtype=torch.float64))
    adapted.eval()
    adapters.write_peft(adapted, tmp_path / "with")
    assert not caplog.text
    x = torch.randn(5, 4, dtype=torch.float64)
    assert torch.equal(adapters.read_peft(net, tmp_path / "with")(x), adapted(x))
    peft = pytest.importorskip("peft")
    theirs = peft.PeftModel.from_pretrained(surgery.copying.clone(net), tmp_path / "with").eval()
    torch.testing.assert_close(theirs(x), adapted(x))


class Alike(nn.Module):
    """The name of one layer ends as that of another does."""

    def __init__(self):
        super().__init__()
        self.fc, self.head, self.other = nn.Linear(4, 4), nn.ModuleDict({"fc": nn.Linear(4, 4)}), nn.Linear(4, 4)

    def forward(self, x):
        return self.other(self.head["fc"](self.fc(x)))


def test_peft__names_that_end_alike_keep_their_ranks_and_scales(tmp_path):
    net, x = Alike(), torch.rand(2, 4)
    tensors, _ = adapters.resize(adapters.state(drawn(adapters.add(net, 2))), {"fc": 3, "head.fc": 2, "other": 2})
    adapted = adapters.attach(net, tensors, scale={"fc": 3.0, "head.fc": 1.0, "other": 1.0})
    adapters.write_peft(adapted, tmp_path / "all")
    again = adapters.read_peft(net, tmp_path / "all")
    assert adapters.scales(again) == pytest.approx(adapters.scales(adapted))
    torch.testing.assert_close(again(x), adapted(x))
    one = drawn(adapters.add(net, 2, modules=["fc"]))
    adapters.write_peft(one, tmp_path / "one")
    peft = pytest.importorskip("peft")
    for name, ours in (("all", adapted), ("one", one)):
        theirs = peft.PeftModel.from_pretrained(surgery.copying.clone(net), tmp_path / name)
        torch.testing.assert_close(theirs(x), ours(x))
        assert sum("lora_A" in key for key in theirs.state_dict()) == len(adapters.scales(ours))


def folder(path, **config):
    adapters.write_peft(adapters.add(network(), 2), path, **config)
    return path


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        *(({"peft_type": kind}, f"unsupported: {kind}") for kind in ("IA3", "LOHA", "ADALORA")),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "unsupported: target_parameters"),
        ({"trainable_token_indices": [3]}, "unsupported: trainable_token_indices"),
        ({"use_dora": True}, "file: use_dora"),
        ({"bias": "all"}, "unsupported: 'all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "unsupported: 'pissa_niter_4'"),
    ],
)
def test_read_peft__what_is_another_function_is_refused(tmp_path, config, expected):
    with refused(expected):
        adapters.read_peft(network(), folder(tmp_path / "adapter", **config))


def test_peft__what_is_missing_is_named(tmp_path):
    with refused("file: adapter_config.json"):
        adapters.read_peft(network(), tmp_path)
    (folder(tmp_path / "adapter") / "adapter_model.safetensors").unlink()
    with refused("file: adapter_model.safetensors"):
        adapters.read_peft(network(), tmp_path / "adapter")
    with refused("file"):
        folder(tmp_path / "adapter")
    with refused("unsupported"):
        adapters.write_peft(adapters.add(nn.Linear(2, 2), 1), tmp_path / "other")
    with refused("argument"):
        adapters.write_peft(network(), tmp_path / "other")


def models():
    transformers = pytest.importorskip("transformers")
    ids, image = torch.tensor([[1, 5, 2, 7]]), torch.rand(1, 3, 8, 8)
    gpt = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    images = {**sizes, "image_size": 8, "patch_size": 4, "num_labels": 3}
    yield transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt)), "*.c_attn", ids
    yield transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes)), "*_proj", ids
    yield transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes)), "*.embed_tokens", ids
    yield (
        transformers.ViTForImageClassification(transformers.ViTConfig(**images)),
        "*.attention.*",
        torch.rand(1, 3, 8, 8),
    )
    yield nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.Flatten(), nn.Linear(36, 2)), "0", image


def logits(model, x):
    found = model(x)
    return getattr(found, "logits", found)


@torch.no_grad()
@pytest.mark.parametrize(("which", "kind"), [*((k, "lora") for k in range(5)), *((k, "dora") for k in (0, 1, 3, 4))])
def test_peft__computes_the_same(which, kind, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, modules, x = list(models())[which]
    model.eval()
    ours = drawn(adapters.add(model, 3, modules=[modules], scale=0.1, kind=kind))
    adapters.write_peft(ours, tmp_path / "ours")
    before = {name: tensor.clone() for name, tensor in surgery.state(model).items()}
    theirs = peft.PeftModel.from_pretrained(surgery.copying.clone(model), tmp_path / "ours").eval()
    torch.testing.assert_close(logits(theirs, x), logits(ours, x))
    assert not torch.allclose(logits(ours, x), logits(model, x))
    names = list(adapters.scales(ours))
    config = peft.LoraConfig(
        r=2, lora_alpha=7, target_modules=names, init_lora_weights=False, use_rslora=True, use_dora=kind == "dora"
    )
    theirs = peft.get_peft_model(surgery.copying.clone(model), config).eval()
    for name, parameter in theirs.named_parameters():
        if "magnitude" in name:
            parameter *= 1 + torch.rand_like(parameter)
    theirs.save_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(logits(adapters.read_peft(model, tmp_path / "theirs"), x), logits(theirs, x))
    whole = surgery.copying.clone(model)
    surgery.load(whole, dict(adapters.fold(surgery.state(model), tmp_path / "theirs")))
    torch.testing.assert_close(logits(whole, x), logits(theirs.merge_and_unload(), x))
    assert all(torch.equal(tensor, before[name]) for name, tensor in surgery.state(model).items())


def llama(tied):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=50, tie_word_embeddings=tied, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("pattern", "settings"),
    [("*.embed_tokens", {}), ("lm_head", {}), ("*.embed_tokens", {"ensure_weight_tying": True})],
)
def test_peft__a_tied_tensor_that_is_trained_whole_is_refused(tmp_path, pattern, settings):
    peft = pytest.importorskip("peft")
    tied = ("'model.embed_tokens.weight'", "'lm_head.weight'")
    ours = adapters.add(llama(True), 2, modules=["*.q_proj"], train=[pattern])
    with refused("unsupported", *tied):
        adapters.write_peft(ours, tmp_path / "ours")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=[pattern.removeprefix("*.")], **settings)
    peft.get_peft_model(llama(True), config).save_pretrained(tmp_path / "theirs")
    with refused("unsupported", *tied):
        adapters.read_peft(llama(True), tmp_path / "theirs")


@pytest.mark.parametrize("setting", [{"padding_mode": "reflect"}, {"dilation": 2}])
def test_peft__a_convolution_that_peft_computes_otherwise_is_refused(tmp_path, setting):
    peft = pytest.importorskip("peft")
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, **setting))
    with refused("unsupported: '0'", *setting):
        adapters.write_peft(adapters.add(net, 2), tmp_path / "ours")
    peft.get_peft_model(surgery.copying.clone(net), peft.LoraConfig(target_modules=["0"])).save_pretrained(tmp_path)
    with refused("unsupported: '0'", *setting):
        adapters.read_peft(net, tmp_path)


class EndsAlike(nn.Module):
    """As a DistilBERT that classifies, with a part that has weights of its own around another's."""

    def __init__(self):
        super().__init__()
        self.fc, self.pre_classifier, self.classifier = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.part = nn.TransformerEncoderLayer(4, 1, 4)
        self.part.pos = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.classifier(self.pre_classifier(self.part(self.fc(x) + self.part.pos)))


@pytest.mark.parametrize(
    ("modules", "train", "task", "taken"),
    [
        (["fc"], ["classifier"], None, "pre_classifier"),
        (["pre_classifier"], ["classifier"], None, "pre_classifier"),
        (["part.linear1"], ["linear1"], None, "part.linear1"),
        (["fc"], [], "TOKEN_CLS", "pre_classifier"),
        (["fc"], ["pre_classifier", "classifier"], "TOKEN_CLS", None),
        (["fc"], ["pre_classifier", "part"], None, None),
    ],
)
def test_peft__trains_the_same_modules_whole_or_none_is_written(tmp_path, modules, train, task, taken):
    peft = pytest.importorskip("peft")
    net, x = EndsAlike().eval(), torch.rand(2, 4)
    net.linear1 = nn.Linear(1, 1)
    ours = drawn(adapters.add(net, 2, modules=modules, train=train))
    for parameter in ours.parameters():
        parameter.data += parameter.requires_grad
    if taken:
        with refused("ambiguous", repr(taken)):
            adapters.write_peft(ours, tmp_path / "ours", task_type=task)
        return
    adapters.write_peft(ours, tmp_path / "ours", task_type=task)
    config = peft.LoraConfig.from_pretrained(tmp_path / "ours")
    config.task_type = None  # the class of a task asks for a model of transformers, and trains these two by itself
    theirs = peft.PeftModel.from_pretrained(surgery.copying.clone(net), tmp_path / "ours", config=config).eval()
    torch.testing.assert_close(theirs(x), ours(x))
    assert torch.equal(adapters.read_peft(net, tmp_path / "ours").eval()(x), ours(x))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("target", "tied"), [("embed_tokens", False), ("lm_head", False), ("lm_head", True)])
def test_peft__weights_of_the_base_that_peft_saves_are_those_of_the_model(tmp_path, target, tied, dtype):
    peft = pytest.importorskip("peft")
    model, x = llama(tied).to(dtype), torch.tensor([[1, 5, 2, 7]])
    config = peft.LoraConfig(r=2, target_modules=[target, "q_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(surgery.copying.clone(model), config).eval()
    theirs.save_pretrained(tmp_path)
    assert any(
        ".base_layer.weight" in name for name in surgery.files.open_state(tmp_path / "adapter_model.safetensors")
    )
    ours = adapters.read_peft(model, tmp_path)
    near = {"atol": 1e-5 if dtype == torch.float32 else 0.1, "rtol": 0}  # peft's factors are float32 in both
    torch.testing.assert_close(logits(ours, x), logits(theirs, x), **near)
    assert not any("base_layer" in name for name in adapters.state(ours))
    if not tied:
        folded = adapters.fold(surgery.state(model), tmp_path)
        merged = surgery.state(adapters.merge(ours))
        assert all(torch.equal(folded[name], merged[name]) for name in merged)
        back = adapters.fold(merged, tmp_path, subtract=True)
        for name, tensor in surgery.state(model).items():
            torch.testing.assert_close(back[name], tensor, **near)
    next(layer for name, layer in model.named_modules() if name.endswith(target)).weight[0] += 1
    for read, base in ((adapters.read_peft, model), (adapters.fold, surgery.state(model)))[: 2 - tied]:
        with refused("mismatch", f"{target}.base_layer.weight'"):
            read(base, tmp_path)


def test_write_peft__names_are_regular_expressions_for_peft(tmp_path):
    peft = pytest.importorskip("peft")
    net = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("fc", "part_fc", "head(")})
    net["part"] = nn.ModuleDict({"fc": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="No modules were targeted"):  # the dot of part.fc is any character
        peft.get_peft_model(net, peft.LoraConfig(target_modules=["part_fc"], modules_to_save=["part.fc"]))
    with refused("ambiguous: 'part_fc'", "'part.fc'"):
        adapters.write_peft(adapters.add(net, 1, modules=["part_fc"], train=["part.fc"]), tmp_path / "adapter")
    with refused("unsupported: 'head('"):
        adapters.write_peft(adapters.add(net, 1, modules=["fc"], train=["head("]), tmp_path / "adapter")
