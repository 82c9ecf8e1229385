import pytest
import timm
import torch
import torchvision
from refusals import refused
from selection import some
from torch import nn

import surgery
from surgery.depth.tree import Skip


def meta(library, name):
    with torch.device("meta"):
        return torchvision.models.get_model(name) if library == "torchvision" else timm.create_model(name)


STAGES = {  # names in the library's own words: their stages' blocks
    "torchvision:resnet18 timm:resnet18": [2, 2, 2, 2],
    "torchvision:resnet50 timm:resnet50": [3, 4, 6, 3],
    "torchvision:vit_b_16 timm:vit_tiny_patch16_224 timm:beit_base_patch16_224": [12],
    "torchvision:swin_t timm:swin_tiny_patch4_window7_224 timm:convnext_atto": [2, 2, 6, 2],
    "torchvision:convnext_tiny": [3, 3, 9, 3],
    "torchvision:mobilenet_v2": [1, 2, 3, 4, 3, 3, 1],
    "torchvision:efficientnet_b0 timm:efficientnet_b0": [1, 2, 2, 3, 3, 4, 1],
    "timm:regnetx_002": [1, 1, 4, 7],
}


STAGED = [(one, found) for names, found in STAGES.items() for one in names.split()]
QUICK = """torchvision:resnet18 timm:resnet50 torchvision:vit_b_16 timm:beit_base_patch16_224 timm:convnext_atto
    torchvision:swin_t torchvision:mobilenet_v2 timm:efficientnet_b0 timm:regnetx_002"""


@pytest.mark.parametrize(("name", "expected"), some(STAGED, [case for case in STAGED if case[0] in QUICK.split()]))
def test_sections__are_the_stages_of_the_papers(name, expected):
    model = meta(*name.split(":"))
    found = surgery.sections(model)
    assert [len(section.blocks) for section in found] == expected
    assert len({section.name for section in found}) == len(found)
    if name.startswith("torchvision") and "mobilenet" not in name:  # a state dict shows the same
        assert surgery.sections(surgery.state(model)) == found


@pytest.mark.slow
def test_sections__blocks_that_widen_are_not_repeatable():
    model = meta("torchvision", "mobilenet_v2")
    found = surgery.sections(model)
    assert [surgery.depth.sections.repeatable(model, s) for s in found] == [False, True, True, True, True, True, False]
    for dense in (meta("torchvision", "densenet121"), meta("timm", "rdnet_tiny"), meta("timm", "inception_v3")):
        assert not any(surgery.depth.sections.repeatable(dense, s) for s in surgery.sections(dense))
    resnet = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1])
    found = surgery.sections(resnet)
    assert [surgery.depth.sections.repeatable(resnet, s) for s in found] == [True, False, False, False]
    bottleneck = torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [1, 1, 1, 1])
    assert not any(surgery.depth.sections.repeatable(bottleneck, s) for s in surgery.sections(bottleneck))


def test_sections__a_stride_is_seen_where_widths_do_not_show_it():
    def block(stride):
        return nn.Sequential(nn.Conv2d(4, 4, 3, stride, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))

    net = nn.Sequential(block(1), block(1), block(2), block(1))
    assert [s.blocks for s in surgery.sections(net)] == [("0", "1"), ("2", "3")]
    falling = nn.Sequential(block(2), block(2))
    assert not any(surgery.depth.sections.repeatable(falling, s) for s in surgery.sections(falling))


def test_sections__one_module_in_two_places_is_not_repeatable():
    block = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    first = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net = nn.Sequential(first, block, block)
    (section,) = surgery.sections(net)
    assert not surgery.depth.sections.repeatable(net, section)


class Named(nn.Module):
    """Blocks as numbered attributes, two branches beside them."""

    def __init__(self):
        super().__init__()
        self.query, self.key = (self.block() for _ in range(2))
        self.block1, self.block2, self.block3 = (self.block() for _ in range(3))

    @staticmethod
    def block():
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def test_sections__numbered_attributes_are_a_section_and_other_names_are_not():
    assert surgery.sections(Named()) == [surgery.Section("", ("block1", "block2", "block3"))]


def test_sections__skips_are_looked_through():
    named = Named()
    named.block2 = Skip()
    assert surgery.sections(named) == [surgery.Section("", ("block1", "block3"))]


def test_sections__a_model_without_blocks_has_no_sections():
    assert surgery.sections(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []
    assert surgery.sections({"weight": torch.zeros(2, 2)}) == []


def test_sections__lists_of_blocks_are_no_blocks_themselves():
    stages = nn.ModuleList(nn.ModuleList(Named.block() for _ in range(2)) for _ in range(2))
    assert [section.name for section in surgery.sections(stages)] == ["0", "1"]


class Listed(nn.Module):
    """A list of blocks, one of which may be in it twice."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("places", [(0, 1, 0), (0, 0, 1), (0, 1, 1), (0, 1, 0, 1)])
@pytest.mark.parametrize("change", [{"keep": [1]}, {"keep": [2]}, {"depths": [4]}])
def test_sections__a_section_with_a_block_in_two_places_is_left_alone_by_name(places, change):
    made = [Named.block(), Named.block()]
    net = Listed(*(made[i] for i in places))
    operation = surgery.ungraft if "keep" in change else surgery.graft
    with refused("depth: 'blocks'"):
        operation(net, **change, example=torch.zeros(1, 4))
    assert len(surgery.ungraft(net, keep={})[0].blocks) == len(places)


def test_sections__a_block_with_another_name_elsewhere_is_no_hindrance():
    net = Listed(Named.block(), Named.block(), Named.block())
    net.first = net.blocks[0]
    assert len(surgery.ungraft(net, keep=[2], example=torch.zeros(1, 4))[0].blocks) == 2


def test_sections__a_compiled_block_among_others_is_named():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)))
    model[2] = torch.compile(model[2])
    for call in (surgery.sections, lambda net: surgery.graft(net, depths={"": 4})):
        with refused("unsupported"):
            call(model)
