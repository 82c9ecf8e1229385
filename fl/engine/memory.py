"""The C library's memory: what a step frees, the next one needs again."""

import ctypes
import functools
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h


@functools.lru_cache(maxsize=1)
def keep_freed_memory() -> bool:
    """Have glibc keep freed memory instead of giving it back; whether that could be arranged.

    A step on the CPU allocates and frees the same activations and gradients over and over. By default much of that goes
    back to the operating system and comes again as page faults, in threads above all. This holds for the whole process,
    whose resident memory then stays at its peak. `MALLOC_TRIM_THRESHOLD_` and the like would do the same from outside.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    wanted = {_TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**24, _MMAP_THRESHOLD: 2**25}  # the most that each can be
    done = [mallopt(name, value) == 1 for name, value in wanted.items()]
    return all(done)
