"""Deeper and shallower models whose blocks have a number, by which they find their slot in a cache."""

import copy
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from symmetric import Made
from torch import nn

import surgery
from surgery import Section, graft, ungraft
from surgery.depth.check import check_cached
from surgery.depth.constants import Shift, numbers, recount_blocks, renumber
from surgery.depth.sections import BLOCKS
from surgery.depth.tree import Chain, Skip
from surgery.plan import Plan


class Mixer(nn.Module):
    """Adds the mean of all tokens so far, those in the cache included."""

    def __init__(self, config, number):
        super().__init__()
        self.config, self.layer_idx, self.value = config, number, nn.Linear(config.width, config.width)

    def forward(self, x, cache):
        value = self.value(x)
        if cache is not None:
            before = cache[self.layer_idx]
            value = cache[self.layer_idx] = value if before is None else torch.cat([before, value], 1)
        mean = value.cumsum(1) / torch.arange(1, value.shape[1] + 1, device=value.device)[:, None]
        return mean[:, -x.shape[1] :]


class Block(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.mixer, self.out = Mixer(config, number), nn.Linear(config.width, config.width)

    def forward(self, x, cache=None):
        return x + self.out(torch.tanh(self.mixer(x, cache)))


class Decoder(nn.Module):
    """Caches as language models do: a slot for each of `config.n_layer` blocks, of which it runs as many."""

    block = Block

    def __init__(self, n_layer):
        super().__init__()
        self.config = SimpleNamespace(width=4, n_layer=n_layer, layer_types=["full"] * n_layer, n_head=3)
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(self.block(self.config, i) for i in range(n_layer))
        self.head = nn.Linear(4, 10)

    def forward(self, input_ids, past=None, use_cache=True):
        if use_cache and past is None:
            past = [None] * len(self.config.layer_types)
        x = self.embed(input_ids)
        for block in self.blocks[: self.config.n_layer]:
            x = block(x, past)
        return {"logits": self.head(x), "past": past}


IDS = torch.arange(12).reshape(2, 6) % 7
EXAMPLE = UserDict(input_ids=IDS)  # like what tokenizers return


def continued(model):
    """The last logits after a pass over the other tokens, from its cache, and without a cache."""
    with torch.no_grad():
        past = model(IDS[:, :-1])["past"]
        return model(IDS[:, -1:], past)["logits"][:, 0], model(IDS, use_cache=False)["logits"][:, -1]


def settings(model):
    return [b.mixer.layer_idx for b in model.modules() if isinstance(b, Block)], vars(model.config)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Decoder(3).eval()


def test_cached_depth__a_deeper_decoder_is_as_its_constructor_would_build_it(net):
    before = copy.deepcopy(settings(net))
    full, plan = graft(net, depths=[5], example=EXAMPLE)
    native = Decoder(5).eval()
    assert settings(net) == before
    assert settings(full) == settings(native) != before
    assert all(module.config is full.config for module in full.modules() if hasattr(module, "config"))
    native.load_state_dict(full.state_dict())
    assert torch.equal(native(IDS)["logits"], full(IDS)["logits"])
    torch.testing.assert_close(*continued(full))
    for back in (Plan.from_json(plan.to_json()).build(full), ungraft(full, keep=[3], example=EXAMPLE)[0]):
        assert settings(back) == before
        assert str(back) == str(net)
        assert torch.equal(back(IDS)["logits"], net(IDS)["logits"])


def test_graft__identity_starts_with_the_same_outputs_and_keeps_the_cache(net):
    full, _ = graft(net, depths=[5], mode="identity", example={"input_ids": IDS})
    assert torch.equal(full(IDS)["logits"], net(IDS)["logits"])
    torch.testing.assert_close(*continued(full))


@pytest.mark.parametrize("kept", [(0, 2), (1, 2)])
def test_ungraft__a_shallower_decoder_numbers_its_blocks_anew(net, kept):
    net.config.layer_types[:] = ["a", "b", "c"]
    small, plan = ungraft(net, keep=[kept], example=EXAMPLE)
    types = [["a", "b", "c"][i] for i in kept]
    assert settings(small) == ([0, 1], vars(net.config) | {"n_layer": 2, "layer_types": types})
    assert settings(plan.build(net)) == settings(small)
    torch.testing.assert_close(*continued(small))


def test_cached_depth__without_an_example_lists_keep_their_length_and_caches_are_right(net, monkeypatch):
    monkeypatch.setitem(BLOCKS, Block, None)
    full, plan = graft(net, depths=[5])
    assert isinstance(full.blocks[2], Chain)
    assert settings(full)[0] == [0, 1, 2, 3, 4]
    torch.testing.assert_close(*continued(full))
    assert settings(plan.build(full)) == settings(ungraft(full, keep=[3])[0]) == settings(net)
    small, _ = ungraft(net, keep=[(0, 2)])
    assert isinstance(small.blocks[1], Skip)
    torch.testing.assert_close(*continued(small))
    with refused("depth: 'blocks'"):
        ungraft(net, keep=[(1, 2)])


class Hidden(Block):
    """Its number is where nobody sees it."""

    def __init__(self, config, number):
        super().__init__(config, (number,))

    def forward(self, x, cache=None):
        slot = None if cache is None else _Slot(cache, *self.mixer.layer_idx)
        return x + self.out(torch.tanh(self.mixer(x, slot)))


class _Slot:
    def __init__(self, cache, number):
        self.cache, self.number = cache, number

    def __getitem__(self, _):
        return self.cache[self.number]

    def __setitem__(self, _, value):
        self.cache[self.number] = value


def test_graft__blocks_that_share_a_slot_are_refused():
    torch.manual_seed(0)
    net = type("Sharing", (Decoder,), {"block": Hidden})(3).eval()
    with refused("depth: layer_idx"):
        graft(net, depths=[4], example=EXAMPLE)
    for size in (3, 4):  # nothing has a value on the meta device, and what was wrong before is no reason to refuse
        check_cached(net.to("meta") if size == 4 else net, copy.deepcopy(net), EXAMPLE)


def test_cached_depth__a_pass_that_goes_on_from_the_cache_is_compared_too(net):
    class Forgetful(Decoder):
        def forward(self, input_ids, past=None, use_cache=True):
            return super().forward(input_ids, None, use_cache)

    broken = copy.deepcopy(net)
    broken.__class__ = Forgetful
    check_cached(net, copy.deepcopy(net), IDS)
    with refused("depth"):
        check_cached(net, broken, (IDS,))


class Numbered(nn.Module):
    def __init__(self, **numbers):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        vars(self).update(numbers)

    def forward(self, x):
        return self.b(self.a(x))


def test_cached_depth__numbers_go_on_through_sections_and_begin_anywhere(monkeypatch):
    monkeypatch.setitem(BLOCKS, Numbered, None)
    net = nn.ModuleDict({"enc": nn.ModuleList(), "dec": nn.ModuleList(), "other": nn.ModuleList()})
    for key, values in {"enc": (1, 2), "dec": (3, 4, 5), "other": (0, 1)}.items():
        net[key].extend(Numbered(layer_idx=i, width=2, depth=7 + i, drop_size=i) for i in values)
    first, second, third = surgery.sections(net)
    assert [*numbers(net, first)] == ["layer_idx"]  # two blocks: a name has to say that it is a number
    modules = [["dec.0"], ["dec.1"], ["dec.2"]]
    assert numbers(net, second) == {"layer_idx": modules, "depth": modules}
    moved = renumber(net, {first: Shift([0, 0], 2)})
    assert moved == {(f"dec.{i}", "layer_idx"): 5 + i for i in range(3)}
    moved = renumber(net, {first: Shift([0, -1], -1), third: Shift([0, 0], 9)})
    assert moved == {("enc.1", "layer_idx"): 1, **{(f"dec.{i}", "layer_idx"): 2 + i for i in range(3)}}
    full, _ = graft(net, depths=[4, 3, 3])
    own = [m.layer_idx for m in full.modules() if isinstance(m, Numbered)]
    assert own == [1, 2, 3, 4, 5, 6, 7, 0, 1, 2]


def test_cached_depth__the_number_of_a_single_block_is_its_position():
    single = Section("", ("0",))
    assert numbers(nn.ModuleList([Numbered(layer_idx=0, padding_idx=0)]), single) == {"layer_idx": [["0"]]}
    assert numbers(nn.ModuleList([Numbered(layer_idx=5)]), single) == {}


def test_cached_depth__numbers_may_belong_to_an_attention_here_and_to_a_convolution_there():
    def block(i, part):
        return nn.ModuleDict({part: Numbered(layer_idx=i, index=i), "mlp": nn.ModuleDict({"inner": Numbered(index=1)})})

    net = nn.ModuleList([block(0, "conv"), block(1, "attention"), block(2, "attention")])
    found = numbers(net, Section("", ("0", "1", "2")))
    assert found == {"layer_idx": [["0.conv"], ["1.attention"], ["2.attention"]]}  # an index of 1 is in all of them
    moved = renumber(net, {Section("", ("0", "1", "2")): Shift([0, -1, -1], -1)})
    assert moved == {("1.attention", "layer_idx"): 0, ("2.attention", "layer_idx"): 1}


def test_sections__counts_are_those_of_the_section_they_are_named_for():
    def stack(n):
        return nn.ModuleDict({"layers": nn.ModuleList(Numbered() for _ in range(n))})

    net = nn.ModuleDict({"encoder": stack(3), "decoder": stack(3)})
    net.config = SimpleNamespace(num_layers=3, decoder_layers=3, n_head=3, max_layers=3, depths=(3, 3), use_layers=True)
    net["decoder"].num_layers = 3
    encoder, decoder = surgery.sections(net)
    deeper = [0, 1, 2, 2]
    assert recount_blocks(net, [encoder, decoder], {encoder: deeper}) == {
        ("", "config.num_layers"): 4,
        ("", "config.depths"): (4, 3),
    }
    assert recount_blocks(net, [encoder, decoder], {decoder: deeper}) == {
        ("", "config.decoder_layers"): 4,
        ("", "config.depths"): (3, 4),
        ("decoder", "num_layers"): 4,
    }
    del net.config.decoder_layers
    assert recount_blocks(net, [encoder, decoder], {encoder: deeper}) == {
        ("", "config.depths"): (4, 3)
    }  # whose num_layers?


def test_graft__numbers_may_decide_how_many_outputs_there_are():
    """As a detector has boxes above a bound; so it cannot run on the meta device."""
    torch.manual_seed(0)

    def finding(net, x):
        x = net.blocks(x)
        return x[x[:, 0] > 0.1]

    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)))
    net, x = Made(finding, blocks=blocks), torch.randn(50, 4)
    deeper, _ = graft(net, depths=[4], example=x)
    assert deeper(x).shape[0] != net(x).shape[0]
    assert len(deeper.blocks) == 4


def stack(n, kind=Numbered):
    return nn.ModuleDict({"layers": nn.ModuleList(kind() for _ in range(n))})


def test_sections__a_count_is_that_of_the_section_of_which_no_nearer_configuration_says_it():
    net = nn.ModuleDict({"vision": stack(3), "text": stack(3)})
    net.config, net["vision"].config = SimpleNamespace(num_layers=3), SimpleNamespace(num_layers=3)
    vision, text = surgery.sections(net)
    assert recount_blocks(net, [vision, text], {text: [0, 1, 2, 2]}) == {("", "config.num_layers"): 4}
    assert recount_blocks(net, [vision, text], {vision: [0, 1, 2, 2]}) == {("vision", "config.num_layers"): 4}


def test_sections__a_decoder_whose_configuration_takes_the_layers_of_an_encoder_for_its_number():
    net = nn.ModuleDict({"decoder": stack(3)})
    net.config = SimpleNamespace(encoder_layers=3, decoder_layers=3, attribute_map={"num_layers": "encoder_layers"})
    (section,) = surgery.sections(net)
    assert recount_blocks(net, [section], {section: [0, 2]}) == {
        ("", "config.encoder_layers"): 2,
        ("", "config.decoder_layers"): 2,
    }


def test_sections__a_configuration_counts_and_lists_all_entries_of_a_list_of_several_sections():
    class Wide(Numbered):
        def __init__(self):
            super().__init__()
            self.c = nn.Linear(2, 2)

    net = stack(2)
    net["layers"].extend([Wide(), Wide()])
    net.config = SimpleNamespace(
        num_layers=4,
        layer_types=[*"aabc"],
        mlp_layer_types=[*"xxyy"],
        only_layers=[0, 1],
        all_layers=[0, 1, 2, 3],
        layer_names=[*"qkvo"],
    )
    first, second = surgery.sections(net)
    assert recount_blocks(net, [first, second], {first: [0, 1, 1], second: [1]}) == {
        ("", "config.layer_types"): [*"aaac"],
        ("", "config.mlp_layer_types"): [*"xxxy"],
    }
    assert recount_blocks(net, [first, second], {second: [0]})["", "config.num_layers"] == 3


def test_sections__a_decoder_beside_an_encoder_without_sections_leaves_the_encoders_number_alone():
    net = nn.ModuleDict({"encoder": nn.Linear(2, 2), "decoder": stack(3)})
    net.config = SimpleNamespace(encoder_layers=3, decoder_layers=3, attribute_map={"num_layers": "encoder_layers"})
    (section,) = surgery.sections(net)
    assert recount_blocks(net, [section], {section: [0, 2]}) == {("", "config.decoder_layers"): 2}
