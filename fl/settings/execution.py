"""Settings of where and how a run is computed, which change only its rounding."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from fl.base.settings import Natural, Rare, one_of
from fl.data.dataset import PLACES
from fl.engine import BACKEND_NAMES
from fl.settings.topic import Topic


@dataclass(frozen=True)
class ExecutionSettings(Topic):
    """The device, backend and files of a run."""

    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is a GPU if there is one"""
    backend: Annotated[str, one_of(*BACKEND_NAMES)] = "auto"
    """how a round's clients train: loop (one after another), workers (threads on the CPU), vmap (all as one
    program), graphs (CUDA graphs); auto: on a CPU by the model's size, elsewhere the fastest that agrees with loop"""
    max_parallel_clients: Annotated[Natural, Rare()] = 0
    """train at most this many clients side by side, to save memory; 0 is all clients of a round"""
    channels_last: Annotated[bool, Rare()] = False
    """keep channels as the last axis of images and convolutions in memory (not with vmap)"""
    deterministic: Annotated[bool, Rare()] = True
    """on CUDA: take only convolutions that add numbers in a fixed order, so that a run can be repeated exactly; without
    it some are faster"""
    data_on: Annotated[str, one_of(*PLACES), Rare()] = "auto"
    """where samples lie: on the device that trains, or on the host, so that only a round's samples are copied;
    auto is the device, and the host for data in memory-mapped files (--dataset folder:PATH)"""
    data_root: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """folder of the data sets [$FL_DATA_ROOT, else ~/.cache/layer-surgery]"""
    download: Annotated[bool, Rare()] = True
    """download a data set that is missing"""
