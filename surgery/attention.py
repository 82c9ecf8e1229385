"""The switch by which attention is computed as plain matrix products."""

import threading
from contextlib import ContextDecorator
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel


class _PlainAttention(ContextDecorator):
    """A context in which attention is matrix products and a softmax.

    Which fused kernel there is depends on the device and on the sizes, and within vmap such kernels do not see that a
    backward pass will come.

    torch's switch holds for the process, so that threads which put it back one after another would leave it off: the
    first to come turns it, and the last to leave puts it back.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._switch = threading.Lock(), 0, sdpa_kernel(SDPBackend.MATH)

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._switch = sdpa_kernel(SDPBackend.MATH)
                self._switch.__enter__()
            self._inside += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._switch.__exit__(None, None, None)


plain_attention = _PlainAttention()
