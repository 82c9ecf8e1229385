"""How much memory is free. It is asked before much is taken, since a process that takes too much is killed unheard."""

from pathlib import Path

_MACHINE = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_FREE_ANYWAY = 2**30  # so little is not asked for


def free_memory() -> int | None:
    """Bytes that this process can still take: those of the machine, or of its control group if that has fewer.

    None on systems that do not say so (other than Linux).
    """
    try:
        lines = dict(line.split(":") for line in _MACHINE.read_text().splitlines())
        machine = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit = int((_GROUP / "memory.max").read_text())  # the text "max" is no limit
        kept = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        taken = int((_GROUP / "memory.current").read_text()) - int(kept.get("inactive_file", 0))
    except (OSError, ValueError):
        return machine
    return max(0, min(machine, limit - taken))


def shortage(needed: int) -> str:
    """What an error says if so many bytes are more than there are; "" if there are enough, or nobody knows.

    >>> shortage(1000), shortage(10**18).split(", ")[0]
    ('', 'would take at least 1,000,000,000.0 GB of memory')
    """
    if needed <= _FREE_ANYWAY:
        return ""
    free = free_memory()
    if free is None or needed <= free:
        return ""
    return f"would take at least {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free"
