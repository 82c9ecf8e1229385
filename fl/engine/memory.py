"""The C library's memory: the next step needs again what a step frees."""

import ctypes
import functools
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h


@functools.lru_cache(maxsize=1)
def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory instead of giving it back to the system; returns whether it agreed.

    A step on the CPU allocates and frees the same activations and gradients over and over. By default much of that goes
    back to the operating system and returns as page faults, above all in threads. The setting is for the whole process,
    whose resident memory then stays at its peak. `MALLOC_TRIM_THRESHOLD_` and the like do the same from outside.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    wanted = {_TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**24, _MMAP_THRESHOLD: 2**25}  # the largest value of each
    done = [mallopt(name, value) == 1 for name, value in wanted.items()]
    return all(done)
