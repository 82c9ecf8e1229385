"""Data sets that do not fit in memory: a folder of memory-mapped arrays."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl.base.errors import FLError
from fl.data import items
from fl.data.dataset import Dataset
from fl.data.loader import Loader

_KEPT = {torch.int64: torch.int32, torch.float64: torch.float32, torch.float16: torch.float32}
"""The types in which a data set holds samples, where they are others."""


def write(
    folder: str | Path,
    train: Any,
    test: Any = None,
    image: str = "image",
    label: str = "label",
    owner: str | None = None,
    task: str = "classification",
) -> Dataset:
    """Write a data set, sample by sample, to a folder of arrays.

    `Dataset.from_folder` and `--dataset folder:PATH` read it. Only labels and owners are held in memory, so that
    samples may be more than fit there.

    Args:
        folder: must not be there yet; it is there as soon as all of it is.
        train, test: data sets of torch or torchvision, whose items are (sample, label), as `Dataset.from_torch` takes
            them; or two `datasets.Dataset` of Hugging Face, such as `datasets.load_from_disk(path)["train"]`, or a
            `datasets.DatasetDict` with splits of these names.
        image, label, owner: the columns of these, see `Dataset.from_huggingface`.

    Returns:
        the data set, as `Dataset.from_folder` reads it.

    Raises:
        FLError: for data that `Dataset.from_torch`, or `from_huggingface`, refuses, and for a folder that is there.
    """
    folder = Path(folder)
    part = folder.with_name(f"{folder.name}.part")
    if folder.exists() or part.exists():
        raise FLError(
            f"{folder if folder.exists() else part} is there already: give a new folder, or remove it", code="file"
        )
    part.mkdir(parents=True)

    def room(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        kind = torch.empty(0, dtype=_KEPT.get(dtype, dtype)).numpy().dtype
        return torch.from_numpy(np.lib.format.open_memmap(part / f"{name}.npy", "w+", kind, shape))

    try:
        if hasattr(train, "column_names") or isinstance(train, dict):
            arrays = items.read_huggingface(train, test, image, label, owner, task, room)
        else:
            arrays = items.read_torch(train, test, task, room)
        settings = {"task": task, "names": list(map(str, arrays.pop("names")))}
        (part / "settings.json").write_text(json.dumps(settings))
        for name in arrays.keys() - {"x", "test_x"}:
            np.save(part / f"{name}.npy", np.asarray(arrays[name]))
        arrays.clear()
        Dataset.from_folder(part)  # which checks it
    except BaseException:
        shutil.rmtree(part)
        raise
    os.replace(part, folder)
    return Dataset.from_folder(folder)


LOADERS = {"folder:PATH": Loader(lambda root, _, path: Dataset.from_folder(root / Path(path).expanduser()))}
