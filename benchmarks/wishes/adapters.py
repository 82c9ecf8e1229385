"""Wishes about adapters of low rank: read, resized, added up."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import surgery
from benchmarks.wishes import error_of
from benchmarks.wishes.merging import head
from surgery import adapters


def files(rank: int = 4, **settings: object) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Write an adapter of two layers as peft does, and return the base and the tensors."""
    tensors = {}
    for name, inputs, outputs in (("0", 8, 16), ("2", 16, 3)):
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank)
    Path("adapter").mkdir(exist_ok=True)
    save_file(tensors, "adapter/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["0", "2"], **settings}
    Path("adapter/adapter_config.json").write_text(json.dumps(config))
    return head(3), tensors


def product(tensors: dict[str, torch.Tensor], name: str = "0") -> torch.Tensor:
    """Return B A of a layer."""
    return tensors[f"base_model.model.{name}.lora_B.weight"] @ tensors[f"base_model.model.{name}.lora_A.weight"]


def read_rslora():
    base, tensors = files(use_rslora=True)
    merged = adapters.merge(adapters.read_peft(base, "adapter"))
    assert torch.allclose(merged[0].weight, base[0].weight + 8 / 4**0.5 * product(tensors), atol=1e-5)


def resize():
    base, tensors = files()
    adapted = adapters.read_peft(base, "adapter")
    larger = adapters.resize(adapters.state(adapted), 6).state
    adapters.write_peft(adapters.attach(base, larger, scale=adapters.scales(adapted)), "larger")
    wide = load_file("larger/adapter_model.safetensors")
    assert torch.allclose(product(wide), product(tensors), atol=1e-5)
    assert wide["base_model.model.0.lora_A.weight"].shape == (6, 8)
    assert json.loads(Path("larger/adapter_config.json").read_text())["lora_alpha"] == 12


def subtract():
    _, one = files()
    _, two = files()
    adapters.stack([one, two], weights=[1, -1])


def fused_experts():
    base, _ = files(target_parameters=["mlp.experts.gate_up_proj"])
    adapters.read_peft(base, "adapter")


def more_tokens():
    class Words(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.embed, self.first = nn.Embedding(size, 8), nn.Linear(8, 8)

    tensors = {"first.lora_A.weight": torch.randn(2, 8), "first.lora_B.weight": torch.randn(8, 2)}
    tensors["embed.weight"] = torch.randn(32, 8)
    base = Words(30)
    assert error_of(lambda: adapters.attach(base, tensors, train=["embed"])).code == "mismatch"
    large = surgery.vocabulary.grow(base, 32, modules=["embed"]).model
    merged = adapters.merge(adapters.attach(large, tensors, train=["embed"]))
    assert torch.equal(merged.embed.weight, tensors["embed.weight"])
    assert torch.allclose(merged.first.weight, base.first.weight + product_of(tensors), atol=1e-6)


def product_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return B A of the layer `first`."""
    return tensors["first.lora_B.weight"] @ tensors["first.lora_A.weight"]


def single_tokens():
    base, _ = files(trainable_token_indices=[3, 4])
    adapters.read_peft(base, "adapter")


def other_names():
    down, up = torch.randn(4, 10), torch.randn(20, 4)
    kohya = {"x.lora_down.weight": down, "x.lora_up.weight": up, "x.alpha": torch.tensor(4.0)}
    small, _ = adapters.resize(kohya, 2)
    both = adapters.stack([kohya, kohya])
    u, s, v = torch.linalg.svd(up @ down)
    scale = small["x.alpha"] / 2
    assert torch.allclose(
        scale * small["x.lora_up.weight"] @ small["x.lora_down.weight"], u[:, :2] * s[:2] @ v[:2], atol=1e-4
    )
    assert torch.allclose(
        both["x.lora_up.weight"] @ both["x.lora_down.weight"] * both["x.alpha"] / 8, up @ down, atol=1e-4
    )


def other_kinds():
    base, _ = files(peft_type="LOHA")
    adapters.read_peft(base, "adapter")
