"""A GPU that is not there: real numbers in the CPU's memory, some of which count as the device's, under CUDA's rules.

    with PretendGPU() as gpu:
        fed = fed.to("cuda")            # every .device, .is_cuda and device= says what it would on a GPU
        with gpu.watch() as seen:
            algorithm.round(server, clients, rng)
        seen.waits, seen.launches       # where the host waited for the device; kernels, graphs and copies launched

What CUDA refuses is refused (`Forbidden`): tensors of two devices in one operation, a host that waits while a graph
is captured, a replay that reads memory which is gone. Numbers are those of the CPU, so that results can be compared
with a round that ran on it. Streams are one after the other here: races are for a real GPU (`pytest -m gpu`).
"""

from pretend_gpu.gpu import PretendGPU, Seen
from pretend_gpu.rules import Forbidden

__all__ = ["Forbidden", "PretendGPU", "Seen"]
