"""`python -m surgery apply RECIPE.yaml`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from surgery.commands.shared import save, size_in_bytes, source, summary
from surgery.errors import SurgeryError

if TYPE_CHECKING:
    from surgery.recipe import Recipe


@dataclass(frozen=True)
class Apply:
    """Carry out the steps of a recipe, which is printed and checked as a whole before anything is written."""

    recipe: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE.yaml")]
    """inputs, steps and outputs; docs/guides/merge.md shows some"""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """check everything, print the steps with sizes, and write nothing"""
    shard_size: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None
    """in folders: the size above which a result is split into several files, such as 5GB"""

    def run(self) -> None:
        """Carry out the command."""
        from surgery.files import Checkpoint, check_new
        from surgery.recipe import planned, read_recipe

        shard_bytes, recipe = size_in_bytes(self.shard_size), read_recipe(self.recipe)
        for path in recipe.outputs:
            check_new(path)
        try:
            inputs, results = planned(recipe, self.recipe.parent)
        except SurgeryError as error:
            raise SurgeryError(f"{self.recipe}: {error}") from None
        known: dict[str, Any] = {**inputs, **results}
        print(_text(recipe, known))
        if self.dry_run:
            return
        like = next((one for one in inputs.values() if isinstance(one, Checkpoint) and one.is_folder), None)
        made = {"recipe": recipe.text, "inputs": {name: source(one) for name, one in inputs.items()}}
        for path, name in recipe.outputs.items():
            save(path, known[name], made={**made, "output": name}, like=like, shard_bytes=shard_bytes)


def _text(recipe: "Recipe", known: dict[str, Any]) -> str:
    lines = [f"input   {name} = {path}: {summary(known[name])}" for name, path in recipe.inputs.items()]
    for name, step in recipe.steps.items():
        said = ", ".join(f"{key}={value}" for key, value in step.items() if key != "do")
        lines.append(f"step    {name} = {step['do']}({said}): {summary(known[name])}")
    return "\n".join([*lines, *(f"output  {path} = {name}" for path, name in recipe.outputs.items())])
