"""The free memory, asked for because a process that takes too much is killed."""

import math
from pathlib import Path

_MACHINE = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_GIVEN_BACK = ("active_file", "inactive_file", "slab_reclaimable")  # of what a group uses, when memory is short
_FREE_ANYWAY = 2**30  # so little is not asked for


def free_memory() -> float | None:
    """Return bytes that this process can still take, swap included.

    They are the machine's, or its control group's if that has fewer. Caches that the system gives back when
    memory is short count as free.

    None on systems that do not say so (other than Linux).
    """
    try:
        lines = dict(line.split(":") for line in _MACHINE.read_text().splitlines())
        machine = int(lines["MemAvailable"].split()[0]) * 1024
        swap = int(lines.get("SwapFree", "0").split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit = int((_GROUP / "memory.max").read_text())  # the text "max" is no limit
        counters = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        taken = int((_GROUP / "memory.current").read_text()) - sum(int(counters.get(name, 0)) for name in _GIVEN_BACK)
    except (OSError, ValueError):
        return machine + swap
    return max(0, min(machine + swap, limit - taken + min(swap, _group_swap())))


def _group_swap() -> float:
    """Return bytes of swap that the control group may still take."""
    try:
        swap = [int((_GROUP / f"memory.swap.{name}").read_text()) for name in ("max", "current")]
    except (OSError, ValueError):  # it has no limit
        return math.inf
    return max(0, swap[0] - swap[1])


def shortage(needed: int) -> str:
    """Return an error's text if fewer bytes are free; "" if enough are, or unknown.

    >>> shortage(1000), shortage(10**18).split(", ")[0]
    ('', 'would take at least 1,000,000,000.0 GB of memory')
    """
    if needed <= _FREE_ANYWAY:
        return ""
    free = free_memory()
    if free is None or needed <= free:
        return ""
    return f"would take at least {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free"
