"""`python -m surgery merge METHOD FILE... --out FILE`."""

from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import tyro

from surgery.commands.one import Files, Model, Shape
from surgery.commands.shared import Floats, save_subject, settings, size_in_bytes, source, summary
from surgery.errors import SurgeryError

_FLAGS = {
    "base": "the model that the others were fine-tuned from: give --base FILE",
    "weights": "--weights",
    "data": "data to measure the models on: give --data MODULE:FUNCTION, a function that gives batches",
    "loss": "--loss",
    "score": "a score to choose models by: give --score MODULE:FUNCTION, a function from a model to a number",
}
"""Arguments of methods that have flags of their own, and what is said where one is needed."""
Function = Annotated[str | None, tyro.conf.arg(metavar="MODULE:FUNCTION")]


@dataclass(frozen=True)
class Merge:
    """Merge checkpoints of one architecture, tensor by tensor, without holding them in memory."""

    method: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="METHOD")]
    """linear, slerp, multislerp, karcher, nearswap, task_arithmetic, ties, dare, breadcrumbs, della, model_stock, sce;
    with a --model and --data also fisher and regmean, with a --score greedy_soup"""
    files: Files
    """.safetensors or .pt files, or folders as HuggingFace's libraries write them"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """the new file, or a new folder, which also gets the other files of the first folder"""
    base: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """the model that the others were fine-tuned from"""
    weights: Annotated[Floats, tyro.conf.arg(metavar="FLOAT,...")] = None
    """a weight for each file [1 each]"""
    set: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[PATTERN:]NAME=VALUE")]] = ()
    """a setting of the method, for all tensors or for those whose name matches: --set density=0.5 --set
    'layer4:density=0.2'"""
    data: Function = None
    """a function of yours that gives batches one after another: pairs of inputs and targets for fisher, inputs for
    regmean"""
    loss: Function = None
    """for fisher, a function of outputs and targets [cross-entropy]"""
    score: Function = None
    """for greedy_soup, a function from a model (without --model from a state dict) to a number; larger is better"""
    model: Model = None
    """timm:NAME, torchvision:NAME or module:factory; folders of transformers' models need none"""
    input: Shape = None
    """shape of one input of the --model [the one that the model was made for]"""
    shard_size: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None
    """in a folder: the size above which the result is split into several files, such as 5GB"""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """check everything and print what would be written"""

    def run(self) -> None:
        """Carry out the command."""
        from surgery.files import check_new
        from surgery.operations.subject import Subject
        from surgery.operations.table import OPERATIONS

        shard_bytes, given = size_in_bytes(self.shard_size), self._given()
        if not self.files:
            raise SurgeryError("there are no models to merge: give two or more files")
        files = [Subject.open(path, self.model, self.input) for path in self.files]
        for file in files:
            file.before = lambda: check_new(self.out)
        told = {**given, "inputs": [source(file.checkpoint) for file in files]}
        if self.base is not None:
            given["base"] = Subject.open(self.base)
            told["base"] = source(given["base"].checkpoint)
        result = OPERATIONS[self.method](models=files, **given)
        check_new(self.out)
        if self.dry_run:
            print(f"would write {self.out}: {summary(result.values)}")
            return
        save_subject(self.out, result, made={"method": self.method, **told}, shard_bytes=shard_bytes)

    def _given(self) -> dict[str, Any]:
        """The arguments of the method other than checkpoints; SurgeryError for one that it lacks, or does not take."""
        from surgery.operations.table import merge_method

        takes = merge_method(self.method)
        found = settings(self.set, [name for name in takes if name not in ("models", *_FLAGS)])
        for name, need in _FLAGS.items():
            value = getattr(self, name)
            if value is not None and name not in takes:
                raise SurgeryError(f"{self.method} takes no --{name}: leave it out")
            if value is None and name in takes and takes[name].default is Parameter.empty:
                raise SurgeryError(f"{self.method} needs {need}")
            if value is not None and name != "base":
                found[name] = list(value) if isinstance(value, tuple) else value
        for name, parameter in takes.items():
            if parameter.default is Parameter.empty and name not in ("models", *_FLAGS, *found):
                raise SurgeryError(f"{self.method} needs --set {name}=VALUE")
        return found
