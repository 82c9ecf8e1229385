"""Wide models of transformers: their configuration says what they are."""

import pytest
import torch
from torch import nn

import surgery

TOKENS = {"input_ids": torch.arange(2, 18).view(2, 8)}


@pytest.mark.parametrize(("name", "tied"), [pytest.param("helium", False, marks=pytest.mark.slow), ("cohere", True)])
def test_configured__a_number_that_is_as_large_as_a_width_by_chance_stays(name, tied, tmp_path, caplog):
    """The class makes the same tensors of twice as wide heads and half as many, but other frequencies."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.CONFIG_MAPPING[name](
        **sizes, head_dim=8, vocab_size=64, num_hidden_layers=1, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    net = transformers.AutoModelForCausalLM.from_config(config).eval()
    wide, _ = surgery.widening.widen(net, rate=2, example=TOKENS)
    assert "configuration" not in caplog.text
    assert wide.config.hidden_size == (32 if tied else 64)  # a table that makes a width and reads it cannot grow
    assert wide.config.num_attention_heads == 8
    wide.save_pretrained(tmp_path)
    again = type(net).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(**TOKENS).logits, wide(**TOKENS).logits)
    torch.testing.assert_close(wide(**TOKENS).logits, net(**TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_configured__what_a_forward_pass_leaves_in_a_model_is_no_part_of_it():
    class Recurrence(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = nn.Linear(3, 8), None
            self.out = nn.Linear(8, 2)

        def forward(self, x):
            h = self.inner(x).tanh()
            h = h if self.last is None else h + 0.5 * self.last
            self.last = h.detach()
            return self.out(h.var(-1, keepdim=True) + h)

    net, x = Recurrence(), torch.randn(4, 3)
    with pytest.raises(surgery.SurgeryError):  # the variance of repeated positions is another one
        surgery.widening.widen(net, rate=2, example=x)
    net = nn.Sequential(Recurrence(), nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1))
    wide, _ = surgery.widening.widen(net, rate=2, example=x)
    assert net[0].last is None
    assert wide[1].out_features == 12
    torch.testing.assert_close(wide(x), net(x), rtol=1e-4, atol=1e-5)
