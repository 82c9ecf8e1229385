"""Sections: consecutive residual blocks with one interface, in a module or state."""

import re
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from torch import nn

from surgery.copying import refuse_compiled
from surgery.depth.order import follow
from surgery.depth.tree import Chain, Part, Skip, as_module, is_sequential
from surgery.errors import SurgeryError
from surgery.names import is_inside, join, outwards
from surgery.states import State, owners, shapes_of, tensors

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Section(NamedTuple):
    """Consecutive blocks with one interface.

    Attributes:
        name: of the module that holds the blocks, with `#0`, `#1`, ... appended if it holds several sections.
        blocks: module names in the order of registration. The first may change stride or width; the others keep both.
    """

    name: str
    blocks: tuple[str, ...]


def sections(model: nn.Module | State, *, example: Any = None) -> list[Section]:
    """Find the sections of a model, in registration order.

    A block is a module that owns several layers and has siblings of the same class and shapes, or that timm's metadata
    declare to be one. It may be a list of unlike modules, such as an attention and a feed-forward. A block that changes
    the shape of its input (width or stride) begins a section. Of nested blocks the outer ones count. Chains that
    `graft` made count as the blocks in them. A block that is registered in several places counts once, and `graft` and
    `ungraft` refuse to change such a section.
    In a state dict, numbered siblings are assumed to be modules of one class, and strides are not known.

    Blocks of a section run one after another, each on the output of the one before. An example shows whether they do:
    experts, branches and heads in a list are then no section. Without one the model does not run, and whatever looks
    like a section is listed.

    Args:
        example: the model's input, see `graft`; the model runs once on the meta device, if it can.

    Raises:
        SurgeryError: for what is neither a module nor a state, and for lazy modules, whose shapes are not known yet;
            for a model that does not run on the example.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> sections(nn.Sequential(nn.Linear(2, 4), block(), block(), nn.Linear(4, 2)))
    [Section(name='', blocks=('1', '2'))]
    """
    return list(ordered_sections(model, example))


def ordered_sections(model: nn.Module | State, example: Any = None) -> dict[Section, bool]:
    """Find sections as `sections` does, and whether each runs block after block.

    That is known where the example shows it, of entries of a Sequential, and of blocks that are declared to be blocks.
    """
    if example is not None and not isinstance(model, nn.Module):
        raise SurgeryError("a state cannot run on an example: give the module, or no example", code="argument")
    if isinstance(model, nn.Module):
        refuse_compiled(model)
    root = as_module(model)
    beside: set[str] = set()
    while True:
        search = _BlockSearch(root, beside)
        candidates = search.sections()
        shown = [None for _ in candidates] if example is None else follow(root, [s.blocks for s in candidates], example)
        if False not in shown:
            known = {*declared_blocks(root)}
            return {section: bool(seen) or search.follow(section, known) for section, seen in zip(candidates, shown)}
        # What lies beside others is no block, but may hold some.
        beside |= {block for section, seen in zip(candidates, shown) if seen is False for block in section.blocks}


def repeatable(model: nn.Module | State, section: Section, place: int = -1) -> bool:
    """Return whether a section's block may be repeated: it keeps its input's shape.

    It may if it has the same class, names and shapes of tensors, and hyper-parameters as the block before it (except
    rates and other fractions, names, positions and window shifts), or if its own layers show the same width at both
    ends and no stride. A module that is registered in two places may not.

    >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)))
    >>> repeatable(net, sections(net)[0])
    True
    """
    search = _BlockSearch(as_module(model))
    block, before = section.blocks[place], section.blocks[:place]
    places = [m for _, m in search.model.named_modules(remove_duplicate=False) if m is search.modules[block]]
    if len(places) > 1:
        return False
    if before:
        return search.joins(before[-1], block)
    return search.keeps(block) or (len(section.blocks) > 1 and search.joins(block, section.blocks[1]))


def shared_places(model: nn.Module, section: Section) -> list[tuple[str, str]]:
    """Return (place, first name) of modules registered also beside a section's blocks.

    >>> block, other = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    >>> net = nn.Sequential(block, other, block)
    >>> shared_places(net, sections(net)[0])
    [('2', '0')]
    """
    search = _BlockSearch(model)
    first_names = {id(module): name for name, module in search.modules.items()}
    parent, kinds = search.parent(section.blocks[0]), {search.kind(name) for name in section.blocks}
    places = []
    for key, module in search.modules[parent]._modules.items():
        place, name = join(parent, key), first_names.get(id(module))
        if name is None or name == place or not (search.container(parent) or key[-1].isdigit()):
            continue
        elsewhere = search.parent(name) != parent and search.kind(name) in kinds
        if name in section.blocks or elsewhere:
            places.append((place, name))
    return places


def changes_shape(model: nn.Module | State, section: Section) -> bool:
    """Return whether the first block changes its input's shape, or may change it.

    >>> net = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    >>> changes_shape(net, Section("", ("0",))), changes_shape(net, Section("", ("1",)))
    (True, False)
    """
    search = _BlockSearch(as_module(model))
    first = section.blocks[0]
    return not (search.keeps(first) or any(search.twins(first, block) for block in section.blocks[1:]))


class _BlockSearch:
    """Questions about a model's modules, with caches; modules `beside` are no blocks."""

    def __init__(self, model: nn.Module, beside: Iterable[str] = ()):
        self.model, self.beside = model, {*beside}
        self.modules = dict(model.named_modules())
        self._signatures: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}

    def sections(self) -> list[Section]:
        groups = self.find()
        order = {name: i for i, name in enumerate(self.modules)}
        groups.sort(key=lambda blocks: order[blocks[0]])
        parents = [self.parent(blocks[0]) for blocks in groups]
        result = []
        for i, (parent, blocks) in enumerate(zip(parents, groups)):
            suffix = f"#{parents[:i].count(parent)}" if parents.count(parent) > 1 else ""
            result.append(Section(parent + suffix, tuple(blocks)))
        return result

    def follow(self, section: Section, declared: Set[str]) -> bool:
        """Return whether blocks are known to run one after another without running them."""
        parent = self.parent(section.blocks[0])
        chains = {name for name in declared if isinstance(self.modules.get(name), Chain)}
        if is_sequential(self.modules[parent]) or all(
            block in declared or block.rpartition(".")[0] in chains for block in section.blocks
        ):
            return True
        # In a state: a ModuleList is never called itself, so the root is none, nor is what a Sequential calls.
        return isinstance(self.model, Part) and all(map(self.container, outwards(parent)))

    def parent(self, name: str) -> str:
        """Return the module that holds a block; chains are looked through."""
        name = name.rpartition(".")[0]
        return name.rpartition(".")[0] if isinstance(self.modules[name], Chain) and name else name

    def kind(self, name: str) -> Any:
        module = self.modules[name]
        return module.kind if isinstance(module, Part) else type(module)

    def composite(self, name: str) -> bool:
        """Return whether the module owns several layers."""
        if name not in self._sizes:
            self._sizes[name] = sum(1 for _ in owners(self.modules[name]))
        return self._sizes[name] > 1

    def groups(self, parent: str) -> Iterator[list[str]]:
        """Yield neighbouring composite children of one class; chains count as blocks."""
        group: list[str] = []
        for child in self.children(parent):
            if isinstance(self.modules[child], Skip):
                continue
            fits = self.composite(child) and child not in self.beside
            if group and not (
                fits and self.kind(child) == self.kind(group[-1]) and self._are_numbered(group[-1], child)
            ):
                yield group
                group = []
            if fits:
                group.append(child)
        if group:
            yield group

    def _are_numbered(self, a: str, b: str) -> bool:
        """Return whether children are in one list, or their names differ by a number."""
        (parent, _, a), (other, _, b) = (name.rpartition(".") for name in (a, b))
        return parent != other or self.container(parent) or a.rstrip("0123456789") == b.rstrip("0123456789") != b

    def children(self, parent: str) -> Iterator[str]:
        for child, module in self.modules[parent].named_children():
            name = join(parent, child)
            if name in self.modules:
                yield from self.children(name) if isinstance(module, Chain) else [name]

    def find(self) -> list[list[str]]:
        """Return the blocks of each section.

        Prefer declared blocks; fall back on structure when they do not fit together.

        (Some models declare whole stages as blocks.)
        """
        declared = self.group_declared(declared_blocks(self.model))
        if any(map(self.has_joined, declared)):
            groups = declared
        else:
            # The strongest evidence available: twins, or blocks that fit together, or their class.
            groups = self._outermost(self.has_twins) or self._outermost(self._fits) or self._alike()
            lonely = [section[-1] for group in declared for section in self.split(group)]
            if declared and not any(map(self.has_twins if any(map(self.keeps, lonely)) else self.has_joined, groups)):
                groups = declared
        return [section for group in groups for section in self.split(group)]

    def _outermost(self, evident: Callable[[list[str]], bool]) -> list[list[str]]:
        """Return the outermost groups with evidence, and groups of their class.

        The search goes level by level from the root.
        """
        level, outermost = [""], []
        blocks: set[Any] = set()
        while level:
            groups = [group for parent in level for group in self.groups(parent)]
            shown = [group for group in groups if evident(group) and not all(map(self._holds_blocks, group))]
            seen = {self.kind(group[0]) for group in shown}
            blocks |= {self.kind(group[0]) for group in shown if not self.container(group[0])}
            # A Sequential may be a block here and something else there, and in a state any name may be a block's:
            # these must also fit together with their neighbours.
            chosen = [
                g
                for g in groups
                if self.kind(g[0]) in blocks
                or ((self.kind(g[0]) in seen or (seen and isinstance(self.modules[g[0]], Part))) and self.has_joined(g))
            ]
            outermost += chosen
            inside = {name for group in chosen for name in group}
            level = [child for parent in level for child in self.children(parent) if child not in inside]
        return outermost

    def _holds_blocks(self, name: str) -> bool:
        """Return whether a module is a list of blocks of one kind, and so no block itself."""
        children, module = list(self.children(name)), self.modules[name]
        if not isinstance(module, nn.ModuleList | nn.ModuleDict) or not all(map(self.composite, children)):
            return False
        return all(self.twins(a, b) for a, b in pairwise(children))

    def _alike(self) -> list[list[str]]:
        """Return single blocks: children of the first level's containers of one class."""
        level = [""]
        while level:
            groups = [group for parent in level for group in self.groups(parent) if not self.container(group[0])]
            parents = [self.parent(group[0]) for group in groups]
            full = [
                group
                for group, parent in zip(groups, parents)
                if self.container(parent) and len(group) == len(list(self.children(parent)))
            ]
            kinds = [self.kind(group[0]) for group in full]
            if repeated := [group for group, kind in zip(full, kinds) if kinds.count(kind) > 1]:
                return repeated
            level = [child for parent in level for child in self.children(parent)]
        return []

    def container(self, name: str) -> bool:
        module = self.modules[name]
        if isinstance(module, Part):
            return bool(module._modules) and all(child.isdigit() for child in module._modules)
        return isinstance(module, _CONTAINERS)

    def group_declared(self, names: list[str]) -> list[list[str]]:
        """Return the named composite modules grouped by parent; chains count as blocks."""
        names = [name for name in names if name in self.modules]
        groups: dict[str, list[str]] = {}
        for name in names:
            group = groups.setdefault(self.parent(name), [])
            blocks = list(self.children(name)) if isinstance(self.modules[name], Chain) else [name]
            group += [block for block in blocks if self.composite(block) and block not in self.beside]
        return [group for group in groups.values() if group]

    def has_twins(self, group: list[str]) -> bool:
        return any(self.twins(a, b) for a, b in pairwise(group))

    def has_joined(self, group: list[str]) -> bool:
        return any(self.joins(a, b) for a, b in pairwise(group))

    def _fits(self, group: list[str]) -> bool:
        """Return whether blocks fit together and are more than a convolution and its norm."""
        return any(
            self.joins(a, b) and sum(tensor.ndim > 1 for tensor in tensors(self.modules[b]).values()) > 1
            for a, b in pairwise(group)
        )

    def split(self, group: list[str]) -> Iterator[list[str]]:
        """Cut a group where a block changes the interface."""
        section: list[str] = []
        for name in group:
            if section and not self.joins(section[-1], name):
                yield section
                section = []
            section.append(name)
        yield section

    def joins(self, before: str, block: str) -> bool:
        """Return whether the block's output has the shape of its input."""
        if self.twins(before, block):
            return True
        return self.keeps(block) and widths(self.modules[before])[1] == widths(self.modules[block])[0]

    def keeps(self, block: str) -> bool:
        """Return whether the block's own layers show one width at both ends and no stride."""
        module = self.modules[block]
        around = [self.modules[self.parent(block)], *module.modules()]
        if any(isinstance(m, nn.Sequential) and type(m).forward is not nn.Sequential.forward for m in around):
            return False  # it may concatenate, as dense stages do
        first, last = widths(module)
        return first == last is not None and not has_stride(module)

    def twins(self, a: str, b: str) -> bool:
        return self._signature(a) == self._signature(b) and not has_stride(self.modules[b])

    def _signature(self, name: str) -> Any:
        if name not in self._signatures:
            self._signatures[name] = (self.kind(name), *signature(self.modules[name]))
        return self._signatures[name]


# May differ between blocks with one interface: depth schedules, positions, and the shift of shifted windows.
_HARMLESS = re.compile(r"drop|name|ind(ex|ices)|idx|_id$|depth|shift|^_|training|inplace|dynamic_mask|always_partition")


def signature(block: nn.Module) -> tuple:
    """Return what blocks with one interface share: names, shapes, classes, settings."""
    parts = [
        (name, type(module).__name__, {k: v for k, v in vars(module).items() if _exact(v) and not _HARMLESS.search(k)})
        for name, module in block.named_modules()
        if not isinstance(module, nn.Identity) and "drop" not in type(module).__name__.lower()
    ]
    return shapes_of(tensors(block)), parts


def _exact(value: Any) -> bool:
    """Return whether a value is no fraction: fractions often follow a schedule."""
    return isinstance(value, int | str) or (isinstance(value, tuple) and all(map(_exact, value)))


def has_stride(block: nn.Module) -> bool:
    """Return whether anything in the block but an attention has a stride."""
    for name, module in block.named_modules():
        stride = getattr(module, "stride", 1)
        largest = max((s for s in (stride if isinstance(stride, tuple | list) else (stride,)) if _exact(s)), default=1)
        if isinstance(largest, int) and largest > 1 and "att" not in name:
            return True
    return False


def widths(block: nn.Module) -> tuple[int | None, int | None]:
    """Return the widths of the first layer's input and of the last layer's output."""
    pairs = []
    for _, module, own_tensors in owners(block):
        tensor = next((t for n, t in own_tensors.items() if n.endswith("weight")), None)
        if tensor is None:
            tensor = max(own_tensors.values(), key=lambda t: t.ndim)
        if tensor.ndim == 1:
            pairs.append((len(tensor), len(tensor)))
        elif tensor.ndim >= 2:
            groups = getattr(module, "groups", len(tensor) if tensor.shape[1] == 1 else 1)
            sides = (tensor.shape[1] * (groups if isinstance(groups, int) else 1), tensor.shape[0])
            pairs.append(sides[::-1] if getattr(module, "transposed", False) else sides)
    pairs = [pair for pair in pairs if pair != (1, 1)] or [(None, None)]  # a gate over channels has no width
    return pairs[0][0], pairs[-1][1]


BLOCKS: dict[type[nn.Module], None] = {}
"""The classes that `register_block` was told."""
ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])


def register_block(kind: ModuleClass) -> ModuleClass:
    """Declare this class, and classes derived from it, residual blocks; return it.

    `surgery.sections` then takes consecutive ones in one module as a section, even if their names do not show that they
    follow each other. Blocks inside of such a block do not count. Register a class once, before you use its models.

    Raises:
        SurgeryError: if it is not a class of modules.

    >>> import surgery
    >>> block = surgery.register_block(type("Block", (nn.Sequential,), {}))
    >>> net = nn.Module()
    >>> net.coarse, net.fine = (block(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    >>> surgery.sections(net)
    [Section(name='', blocks=('coarse', 'fine'))]
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise SurgeryError(f"{kind!r} is not a class of modules: register the class itself", code="argument")
    BLOCKS[kind] = None
    return kind


def declared_blocks(model: nn.Module) -> list[str]:
    """Return the names of modules that their class or metadata declare to be blocks."""
    kinds = tuple(BLOCKS)
    blocks = [name for name, module in model.named_modules() if name and isinstance(module, kinds)]
    blocks = [name for name in blocks if not any(is_inside(name, other) for other in blocks if other != name)]
    others = [b for b in _matched_blocks(model) if not any(is_inside(b, name) or is_inside(name, b) for name in blocks)]
    return blocks + others


def _matched_blocks(model: nn.Module) -> list[str]:
    """Return the modules that `group_matcher` declares to be blocks, by name.

    timm's models have this method, and so have the models of this project's zoo. In a state, modules called
    `section<i>.<j>` are blocks, as in the zoo. Empty for other models, and if no match ends where a module's name does.
    """
    matcher = getattr(model, "group_matcher", None)
    groups = matcher(coarse=False) if callable(matcher) else None
    if isinstance(model, Part):
        groups = {"blocks": r"^section(\d+)\.(\d+)"}
    if not isinstance(groups, dict):
        return []
    patterns = []  # patterns with an ordinal (downsample, final norm) and the stem's say what is not a block
    for group, spec in groups.items():
        pairs = spec if isinstance(spec, list | tuple) else [] if spec is None else [(spec, None)]
        patterns += [(re.compile(regex), group != "stem" and ordinal is None) for regex, ordinal in pairs]
    blocks: dict[str, None] = {}
    for _, _, own_tensors in owners(model):
        for name in own_tensors:
            match, is_block = next(((m, b) for p, b in patterns if (m := p.match(name))), (None, False))
            if is_block and name[match.end() : match.end() + 1] == ".":
                blocks[name[: match.end()]] = None
    return list(blocks)
