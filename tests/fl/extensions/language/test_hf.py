"""Models of transformers: what the library computes, on all backends, with adapters, and back into a folder."""

import json
import math
import pickle
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from refusals import fl_refused
from safetensors.torch import load_file, save_file
from selection import some

import fl
from fl.data import TextOptions
from fl.data.text import decode
from fl.extensions.language.adapters import AdapterOptions
from surgery.adapters import read_peft

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TOPICS = "How tokens are read.\nEach of them has a number, and the model says which one comes next.\n" * 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders as save_pretrained writes them: gpt2 (with a tokenizer, dropout of 0.1 everywhere), llama, bert, vit."""
    root = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    gpt2 = transformers.GPT2Config(
        vocab_size=320, n_layer=2, n_embd=32, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    llama = transformers.LlamaConfig(vocab_size=320, num_key_value_heads=2, attention_dropout=0.1, **SIZES)
    bert = transformers.BertConfig(vocab_size=100, max_position_embeddings=32, **SIZES)
    vit = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=5, **SIZES)
    for name, model in {
        "gpt2": transformers.GPT2LMHeadModel(gpt2),
        "llama": transformers.LlamaForCausalLM(llama),
        "bert": transformers.BertForMaskedLM(bert),
        "vit": transformers.ViTForImageClassification(vit),
    }.items():
        model.save_pretrained(root / name)
    said = {"do_rescale": True, "rescale_factor": 1 / 255, "image_mean": [0.4], "image_std": [0.3]}
    (root / "vit/preprocessor_config.json").write_text(json.dumps(said))
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TOPICS], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>").save_pretrained(root / "gpt2")
    (root / "notes.txt").write_text(TOPICS)
    return root


def padded():
    """Sequences of 12 tokens, half of which end in three of padding, in three classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(1, 100, (60, 12), generator=generator).int()
    x[::2, 9:] = 0
    y = torch.arange(60) % 3
    return fl.Dataset.from_arrays(x[:40], y[:40], x[40:], y[40:])


def settings(folders, name, kind="hf", **changes):
    """One round of one client with plain SGD, and the data if they have no name."""
    given, data = {}, None
    if name in ("gpt2", "llama"):
        given = {
            "dataset": f"text:{folders / 'notes.txt'}",
            "text": TextOptions(f"tokenizer:{folders / 'gpt2'}", length=16),
        }
    elif name == "bert":
        data = padded()
    else:
        given["samples"] = 60
    basic = {
        "algorithm": "fedavg", "rounds": 1, "clients": 3, "participants": 3, "partition": "iid", "min_samples": 1,
        "local_epochs": 1, "batch_size": 4, "lr": 0.1, "momentum": 0.0, "model": f"{kind}:{folders / name}",
    }  # fmt: skip
    return fl.Config.of(**basic | given | changes), data


def library(folder, name):
    """The library's own model of a folder, and how it is called on samples as fl has them."""
    cls = {"bert": "BertForSequenceClassification", "vit": "ViTForImageClassification"}.get(name)
    cls = getattr(transformers, cls) if cls else transformers.AutoModelForCausalLM
    model = cls.from_pretrained(folder).eval()
    if name == "vit":
        return model, lambda x: model(pixel_values=((x + 1) / 2 - 0.4) / 0.3).logits
    if name == "bert":
        return model, lambda x: model(input_ids=x, attention_mask=(x != 0).long()).logits
    return model, lambda x: model(input_ids=x).logits


CASES = {
    "gpt2": {},
    "llama": {},
    "bert": {},
    "vit": {},
    "llama-lora": {"adapters": AdapterOptions("lora", rank=2, modules=("*.q_proj", "*.v_proj"))},
    "bert-lora": {"adapters": AdapterOptions("lora", rank=2, modules=("*.query",), train=("*.classifier",))},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", some(CASES, ["bert", "llama-lora"]))
def test_export_model__backends_agree_and_an_exported_folder_is_the_librarys(case, folders, tmp_path):
    """Also with dropout in training, which all backends draw alike."""
    name, trained = case.partition("-")[0], {}
    for backend in ("loop", "vmap", "workers"):
        config, data = settings(folders, name, backend=backend, **CASES[case])
        fl.simulate(config, tmp_path / backend, dataset=data)
        trained[backend] = fl.load_model(tmp_path / backend)
    for backend in ("vmap", "workers"):
        for one, other in zip(trained["loop"].parameters(), trained[backend].parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    net, begun = trained["loop"], fl.build(config, data)[0].model.state_dict()
    if not case.endswith("lora"):
        head = "model.lm_head.weight" if name in ("gpt2", "llama") else "model.classifier.weight"
        assert not torch.equal(begun[head], net.state_dict()[head])
    fl.export_model(tmp_path / "loop", tmp_path / "out")
    _, call = library(tmp_path / "out", name)
    x = {"vit": torch.rand(5, 1, 8, 8) * 2 - 1, "bert": padded().test_x[:5].long()}.get(name)
    x = torch.randint(1, 300, (5, 16)) if x is None else x
    torch.testing.assert_close(net(x), call(x), rtol=1e-5, atol=1e-6)
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors"} <= there
    assert (name == "gpt2") == ("tokenizer.json" in there)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("lora")])
def test_export_model__peft_loads_an_exported_adapter(case, folders, tmp_path):
    peft = pytest.importorskip("peft")
    name = case.partition("-")[0]
    options = CASES[case]["adapters"]
    if name == "bert":  # whose pooler the folder does not have
        config, data = settings(folders, name, **CASES[case])
        fl.simulate(config, tmp_path / "drawn", dataset=data)
        with pytest.raises(fl.FLError, match=r"base is random \(model.bert.pooler.dense"):
            fl.export_model(tmp_path / "drawn", tmp_path / "adapter", format="peft")
        options = replace(options, train=("*.classifier", "*.pooler"))
    config, data = settings(folders, name, adapters=options)
    fl.simulate(config, tmp_path / "run", dataset=data)
    fl.export_model(tmp_path / "run", tmp_path / "adapter", format="peft")
    cls = transformers.BertForSequenceClassification if name == "bert" else transformers.AutoModelForCausalLM
    written = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(folders / name)
    base = cls.from_pretrained(folders / name, **({"num_labels": 3} if name == "bert" else {}))
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    x = padded().test_x[:5].long() if name == "bert" else torch.randint(1, 300, (5, 16))
    logits = tuned(input_ids=x, attention_mask=(x != 0).long()).logits
    torch.testing.assert_close(fl.load_model(tmp_path / "run")(x), logits, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_hf__adapters_of_a_base_that_no_folder_has_are_not_exported_alone(folders, tmp_path):
    options = {"adapters": AdapterOptions("lora", rank=2, modules=("*.q_proj",))}
    fl.simulate(settings(folders, "llama", "hf-config", **options)[0], tmp_path / "drawn")
    with fl_refused("unsupported", "--init"):
        fl.export_model(tmp_path / "drawn", tmp_path / "out", format="peft")
    fl.simulate(settings(folders, "llama", depth=(1,), **options)[0], tmp_path / "cut")
    with fl_refused("unsupported", "--width", "--depth"):
        fl.export_model(tmp_path / "cut", tmp_path / "out", format="peft")
    fl.simulate(settings(folders, "llama")[0], tmp_path / "whole")
    begun = fl.export_model(tmp_path / "whole", tmp_path / "begun.safetensors")
    fl.simulate(settings(folders, "llama", init=str(begun), **options)[0], tmp_path / "tuned")
    fl.export_model(tmp_path / "tuned", tmp_path / "out", format="peft")
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["base_model_name_or_path"] is None
    base = transformers.AutoModelForCausalLM.from_pretrained(folders / "llama").eval()
    base.load_state_dict({name.removeprefix("model."): t for name, t in load_file(begun).items()}, strict=False)
    x = torch.randint(1, 300, (5, 16))
    logits = read_peft(base, tmp_path / "out")(input_ids=x).logits
    torch.testing.assert_close(fl.load_model(tmp_path / "tuned")(x), logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
def test_hf__the_first_logits_are_the_librarys(name, folders):
    """Of the vocabulary all logits are given, also those of numbers that the tokenizer does not have."""
    changes = {"dataset": fl.Dataset.from_arrays(*_images())} if name == "vit" else {}
    config, _ = settings(folders, name, **{"samples": 0} if changes else {})
    fed, _ = fl.build(config, **changes)
    _, call = library(folders / name, name)
    x = fed.data.normalise(fed.data.test_x[:4])
    with torch.no_grad():
        torch.testing.assert_close(fed.model.eval()(x), call(x), rtol=1e-5, atol=1e-6)
    assert fed.data.classes == (5 if name == "vit" else 320)


def _images():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (40, 1, 8, 8), generator=generator, dtype=torch.uint8)
    return x[:30], torch.arange(30) % 5, x[30:], torch.arange(10) % 5


@pytest.mark.slow
def test_simulate__a_round_of_one_client_is_sgd_by_hand(folders, tmp_path):
    """The loss is the library's own, of labels that it shifts itself; perplexity is its exponential."""
    model = transformers.LlamaForCausalLM.from_pretrained(folders / "llama", attention_dropout=0.0).train()
    folder = tmp_path / "still"
    model.save_pretrained(folder)
    changes = {"clients": 1, "participants": 1, "samples": 10, "batch_size": 10}
    config, _ = settings(folders, "llama", model=f"hf:{folder}", **changes)
    summary = fl.simulate(config, tmp_path / "run")
    data = fl.build(config)[0].data
    x = torch.cat([data.x, data.y[:, -1:]], 1).long()
    model(input_ids=x, labels=x).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= config.local.lr * parameter.grad
    trained = dict(fl.load_model(tmp_path / "run").model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        logits = model.eval()(input_ids=data.test_x.long()).logits
    loss = F.cross_entropy(logits.double().flatten(0, 1), data.test_y.flatten())
    assert math.isclose(summary["final"]["perplexity"], loss.exp().item(), rel_tol=1e-5)


def test_hf__drawn_weights_follow_the_seed(folders):
    first, again, other = (
        fl.build(settings(folders, "gpt2", "hf-config", seed=seed)[0])[0].model.state_dict() for seed in (0, 0, 1)
    )
    name = "model.transformer.h.0.attn.c_attn.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert torch.equal(first["model.transformer.wte.weight"], first["model.lm_head.weight"])


def test_hf__a_classifier_for_other_classes_is_drawn_and_said(folders, caplog):
    config, data = settings(folders, "bert", adapters=AdapterOptions("lora", modules=("*.query",)))
    fl.build(config, data)
    said = next(line for line in caplog.messages if "begins with a random" in line)
    assert "classifier.weight" in said
    assert "--adapters freezes" in said
    caplog.clear()
    same = fl.Dataset.from_arrays(*_images())  # five classes, as the folder's own
    fl.build(settings(folders, "vit", samples=0)[0], same)
    assert [line for line in caplog.messages if "drawn" in line] == []


@pytest.mark.slow
def test_simulate__a_run_goes_on_with_the_same_base_only(folders, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    for file in (folders / "llama").iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    changes = {"adapters": AdapterOptions("lora", rank=2, modules=("*.q_proj",)), "samples": 10}
    text = {"dataset": f"text:{folders / 'notes.txt'}", "text": TextOptions(f"tokenizer:{folders / 'gpt2'}", length=16)}
    whole, part = (settings(tmp_path, "base", **changes | text, rounds=n)[0] for n in (2, 1))
    fl.simulate(whole, tmp_path / "whole")
    fl.simulate(part, tmp_path / "part")
    fl.simulate(whole, tmp_path / "part", resume=True)
    one, other = (fl.load_model(tmp_path / name).state_dict() for name in ("whole", "part"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with fl_refused("folder", "--init"):
        fl.load_model(tmp_path / "part")
    del weights["model.norm.weight"]
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with fl_refused("mismatch", "LlamaForCausalLM", "model.norm"):
        fl.build(part)


def test_hf__text_by_a_tokenizer(folders):
    data = settings(folders, "gpt2")[0].load()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders / "gpt2")
    tokens = tokenizer(TOPICS)["input_ids"]
    assert data.x.flatten().tolist() == tokens[: data.x.numel()]
    assert data.y[0].tolist() == tokens[1:17]
    assert data.classes == len(tokenizer)
    assert decode(data.x[0], data.vocabulary) == tokenizer.decode(tokens[:16])
    assert decode(data.x[0], pickle.loads(pickle.dumps(data.vocabulary))) == tokenizer.decode(tokens[:16])


def test_simulate__bf16(folders, tmp_path):
    config, _ = settings(folders, "gpt2", precision="bf16", samples=10)
    assert math.isfinite(fl.simulate(config, tmp_path / "run")["final"]["loss"])
    assert {p.dtype for p in fl.load_model(tmp_path / "run").parameters()} == {torch.float32}


@pytest.mark.slow
def test_export_model__a_cut_model_is_no_folder(folders, tmp_path):
    config, _ = settings(folders, "llama", samples=10, width=0.5)
    fl.simulate(config, tmp_path / "run")
    with fl_refused("unsupported", "--width"):
        fl.export_model(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


REFUSED = {
    "hf:gpt2": "gpt2 is no folder here, and nothing is fetched",
    "hf:ROOT": "model_type",
    "hf:ROOT/gpt2/config.json": "hf-config:FILE",
    "hf:ROOT/vit": "no model of text",
    "hf:ROOT/bert": "vocabulary of 100 tokens, and .* has 300: .*--text.tokens tokenizer:FOLDER",
}


@pytest.mark.parametrize("model", REFUSED)
def test_hf__what_cannot_be_is_refused(model, folders):
    config, _ = settings(folders, "gpt2", model=model.replace("ROOT", str(folders)))
    with pytest.raises(fl.FLError, match=REFUSED[model]):
        fl.build(config)


def test_hf__other_samples_are_refused_with_the_way_out(folders):
    with fl_refused("run", "128", "max_position_embeddings"):
        fl.build(settings(folders, "gpt2", text=TextOptions(f"tokenizer:{folders / 'gpt2'}", length=128))[0])
    with fl_refused("run", "image_size"):
        fl.build(settings(folders, "vit", pad=2)[0])
    with fl_refused("run", "pad_token_id"):
        fl.build(settings(folders, "bert", model=f"hf:{folders / 'gpt2'}")[0], padded())
    for tokens, told in {"letters": "give word, byte or", "tokenizer:none": "nothing is fetched"}.items():
        with pytest.raises(fl.FLError, match=told):
            settings(folders, "gpt2", text=TextOptions(tokens))[0].load()


def test_hf__without_the_library_the_error_names_the_extra(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with fl_refused("missing", "'layer-surgery[hf]'"):
        fl.build(settings(folders, "gpt2")[0])


def test_hf__next_tokens_see_no_later_ones_and_any_earlier_one(tmp_path):
    torch.manual_seed(0)
    bert = transformers.BertConfig(vocab_size=320, max_position_embeddings=32, **SIZES)
    bert.save_pretrained(tmp_path / "bert")
    (tmp_path / "notes.txt").write_text(TOPICS)
    given = {"dataset": f"text:{tmp_path / 'notes.txt'}", "partition": "iid", "clients": 2, "participants": 2}
    given |= {"text": TextOptions("byte", length=16), "min_samples": 1, "algorithm": "fedavg"}
    with fl_refused("unsupported", "--model"):
        fl.build(fl.Config.of(model=f"hf-config:{tmp_path / 'bert'}", **given))
    gpt2 = transformers.GPT2Config(
        vocab_size=320, n_layer=2, n_embd=32, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    model = transformers.GPT2LMHeadModel(gpt2).eval()
    model.save_pretrained(tmp_path / "gpt2")
    fed, _ = fl.build(fl.Config.of(model=f"hf:{tmp_path / 'gpt2'}", **given))
    x = torch.tensor([[0, 5, 0, 7, 9, 0]])
    with torch.no_grad():
        torch.testing.assert_close(fed.model.eval()(x), model(x).logits, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_export_model__what_lies_beside_a_file_of_settings_stays_there(tmp_path):
    transformers.LlamaConfig(vocab_size=320, num_key_value_heads=2, **SIZES).save_pretrained(tmp_path / "llama")
    (tmp_path / "llama/vocabulary_notes.txt").write_text("private")
    (tmp_path / "llama/vocab.txt").write_text("words")
    (tmp_path / "llama/tokenizer_old").mkdir()
    (tmp_path / "notes.txt").write_text(TOPICS)
    for k, name in enumerate((f"hf-config:{tmp_path / 'llama/config.json'}", f"hf-config:{tmp_path / 'llama'}")):
        config = fl.Config.of(
            algorithm="fedavg", dataset=f"text:{tmp_path / 'notes.txt'}", partition="iid", clients=2, participants=2,
            rounds=1, text=TextOptions("byte", length=16), min_samples=1, model=name,
        )  # fmt: skip
        fl.simulate(config, tmp_path / f"run{k}")
        fl.export_model(tmp_path / f"run{k}", tmp_path / f"out{k}")
        assert (tmp_path / f"out{k}/vocab.txt").exists() == bool(k)
        assert not (tmp_path / f"out{k}/vocabulary_notes.txt").exists()


def bert(**settings):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=100, max_position_embeddings=32, num_labels=3, **SIZES, **settings)
    return transformers.BertForSequenceClassification(config)


def with_mask():
    data = padded()
    x, test_x = ({"input_ids": x, "attention_mask": x.ne(0).int()} for x in (data.x, data.test_x))
    return fl.Dataset.from_arrays(x, data.y, test_x, data.test_y)


def one_round(net, data, backend, **more):
    few = {"clients": 3, "participants": 3, "batch_size": 5, "partition": "iid", "local_epochs": 1, "lr": 0.1}
    few |= {"min_samples": 2, "momentum": 0.0, "rounds": 1, **more}
    fed, method = fl.build(fl.Config.of(algorithm="fedavg", backend=backend, **few), data, net)
    server, update = method.round(method.init(), list(range(len(fed.clients))), fl.Rng(0, 1))
    return fed, method, server, update


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize("masked", [False, True])
def test_hf__a_librarys_classifier_trains_as_it_is(masked):
    """Its output object's logits are taken; one step of all samples is that of torch, its loss that of the library."""
    net, data = bert(**NO_DROPOUT), with_mask() if masked else padded()
    _, method, server, update = one_round(net, data, "loop", clients=1, participants=1, batch_size=40)
    x = data.x if masked else {"input_ids": data.x}
    out = net.train()(**{name: values.long() for name, values in x.items()}, labels=data.y)
    out.loss.backward()
    assert update.loss.item() == pytest.approx(out.loss.item(), rel=1e-5)
    for name, p in net.named_parameters():
        wanted = p if p.grad is None else p - 0.1 * p.grad
        torch.testing.assert_close(server["global"][name], wanted.detach(), atol=1e-6, rtol=1e-5)
    net.load_state_dict(server["global"])
    x = data.test_x if masked else {"input_ids": data.test_x}
    with torch.no_grad():
        expected = net.eval()(**{name: values.long() for name, values in x.items()}).logits
    torch.testing.assert_close(method.predict(server, data.test_x), expected, atol=1e-5, rtol=1e-4)


def test_hf__backends_agree_on_its_default_dropouts():
    net, data = bert(), with_mask()
    assert net.config._attn_implementation == "sdpa"
    made = [one_round(net, data, backend)[2]["global"] for backend in ("loop", "loop", "vmap")]
    without = one_round(bert(**NO_DROPOUT), data, "loop")[2]["global"]
    for name, tensor in made[0].items():
        assert torch.equal(made[1][name], tensor)
        torch.testing.assert_close(made[2][name], tensor, atol=1e-5, rtol=1e-4)
    assert any(not torch.allclose(without[name], tensor, atol=1e-4) for name, tensor in made[0].items())


def test_hf__padding_does_not_matter_where_the_mask_hides_it():
    data, other = with_mask(), with_mask()
    other.x["input_ids"][other.x["attention_mask"] == 0] = 7
    one, two = (one_round(bert(), some, "vmap")[2]["global"] for some in (data, other))
    for name, tensor in one.items():
        if "word_embeddings" not in name:  # those of padding have moved
            torch.testing.assert_close(two[name], tensor, atol=1e-6, rtol=1e-5)
