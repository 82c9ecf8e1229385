"""`python -m surgery apply RECIPE.yaml`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from surgery.commands.shared import save_subject, size_in_bytes, source, summary
from surgery.errors import SurgeryError
from surgery.operations.texts import shown

if TYPE_CHECKING:
    from surgery.operations.subject import Subject
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
        from surgery.files import check_new
        from surgery.recipe import planned, read_recipe

        shard_bytes, recipe = size_in_bytes(self.shard_size), read_recipe(self.recipe)

        def before() -> None:
            for path in recipe.outputs:
                check_new(path)

        try:
            inputs, results = planned(recipe, self.recipe.parent, before)
        except SurgeryError as error:
            raise SurgeryError(f"{self.recipe}: {error}") from None
        before()
        known = {**inputs, **results}
        print(_text(recipe, known))
        if self.dry_run:
            return
        made = {"recipe": recipe.text, "inputs": {name: source(one.checkpoint) for name, one in inputs.items()}}
        for path, name in recipe.outputs.items():
            save_subject(path, known[name], made={**made, "output": name}, shard_bytes=shard_bytes)


def _text(recipe: "Recipe", known: Mapping[str, "Subject"]) -> str:
    lines = []
    for name, one in recipe.inputs.items():
        model = f" of {one.model}" if one.model else ""
        lines.append(f"input   {name} = {one.path}{model}: {summary(known[name].values)}")
    for name, step in recipe.steps.items():
        said = ", ".join(
            f"{key}={value if isinstance(value, str) else shown(value)}" for key, value in step.items() if key != "do"
        )
        results = [one for one in known if one == name or (one not in recipe.steps and one.startswith(f"{name}."))]
        for one in results:
            lines.append(f"step    {one} = {step['do']}({said}): {summary(known[one].values)}")
    return "\n".join([*lines, *(f"output  {path} = {name}" for path, name in recipe.outputs.items())])
