"""`python -m surgery passthrough FILE... --blocks SECTION=BLOCKS --out FILE`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from surgery.commands.one import Files, Model, Shape, save_plan
from surgery.commands.shared import save_subject, source, summary
from surgery.errors import SurgeryError

Entries = tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE")]]


@dataclass(frozen=True)
class Passthrough:
    """Put a network together from the blocks of several, as mergekit's passthrough does; models count from 0."""

    files: Files
    """the checkpoints; the first says what all looks like that is not named. To repeat a block, give a file twice"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """the new checkpoint"""
    blocks: Entries = ()
    """a section of the first model and its new blocks, MODEL:BLOCK or MODEL:FIRST-LAST: --blocks layer3=0:0-4,1:3-5;
    may be given for several sections"""
    outside: Entries = ()
    """tensors outside of these sections that another model gives, by name or pattern: --outside fc=1"""
    model: Model = None
    """timm:NAME, torchvision:NAME or module:factory of the first; needed where blocks are no entries of a Sequential
    [the tensors' names show the blocks]"""
    input: Shape = None
    """shape of one input, by which the new --model is tried [the one that the model was made for]"""
    plan: Annotated[Path | None, tyro.conf.arg(metavar="PLAN.json")] = None
    """where to write the plan, which cuts the network out of all tensors, those of model K under K.NAME"""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """check everything and print what would be written"""

    def run(self) -> None:
        """Carry out the command."""
        from surgery.files import check_absent, check_new
        from surgery.operations.mixtures import passthrough
        from surgery.operations.subject import Subject

        if not self.files or not self.blocks:
            raise SurgeryError("passthrough needs checkpoints and the new blocks: give --blocks layer3=0:0-4,1:3-5")
        blocks, outside = _entries("blocks", self.blocks), _entries("outside", self.outside)
        if odd := [value for value in outside.values() if not value.isdecimal()]:
            raise SurgeryError(f"--outside {odd[0]}: give the number of a model, from 0, such as --outside fc=1")
        files = [Subject.open(path, self.model, self.input) for path in self.files]
        numbers = {pattern: int(value) for pattern, value in outside.items()}
        result = passthrough(files, blocks=blocks, outside=numbers)
        check_new(self.out)
        if self.plan is not None:
            check_absent(self.plan)
        if self.dry_run:
            print(f"would write {self.out}: {summary(result.values)}")
            return
        inputs = [source(file.checkpoint) for file in files]
        made = {"do": "passthrough", "blocks": blocks, "outside": numbers, "inputs": inputs}
        save_subject(self.out, result, made=made)
        save_plan(self.plan, result.plan)


def _entries(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE as a dict; the name may be "", which is the section of a model that is one."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        if not equals or name in found:
            what = "is there twice" if equals else "has no ="
            raise SurgeryError(f"--{flag} {text} {what}: write NAME=VALUE, each name once")
        found[name] = value
    return found
