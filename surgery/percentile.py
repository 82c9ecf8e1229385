"""The norm of the entries up to a quantile of their magnitudes, for many tensors at once, without sorting them."""

import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.states import compute_dtype
from surgery.threads import in_threads

# All in elements.
_BATCH = 1 << 20  # small tensors are put together up to this size on an accelerator
_LARGE = 1 << 19  # and up to this size on the CPU; larger tensors are searched where they lie
_CHUNK = 1 << 19  # searched and squared at once; a multiple of _ROW; an eighth of it took 1.6 times as long
_ROW = 1024  # squares are summed over a row in the tensor's own precision, and over rows in float64


def joint_norms(jobs: Sequence[Sequence[Tensor]], q: float) -> Tensor:
    """For each job the percentile norm of all its tensors together, and the number of entries in it.

    [J, 2], float64, on the CPU. (NaN, 0) for a job that holds NaN or infinity, (0, 0) for one without entries or
    without data (meta device). The tensors may be on any devices; each device is waited for once.
    """
    check_quantile(q)
    jobs = [[tensor.detach() for tensor in job] for job in jobs]
    alike: dict[tuple[torch.device, torch.dtype, int], list[int]] = {}
    for j, job in enumerate(jobs):
        size = sum(tensor.numel() for tensor in job)
        if size and not job[0].is_meta:
            alike.setdefault((job[0].device, _common(job), size), []).append(j)
    parts: dict[torch.device, list[list[int]]] = {}  # jobs of equal size are done together, the longest first
    for (device, _, size), members in sorted(alike.items(), key=lambda item: -item[0][2]):
        step = max(1, (_LARGE if device.type == "cpu" else _BATCH) // size)
        parts.setdefault(device, []).extend(members[start : start + step] for start in range(0, len(members), step))

    def measure(part: list[int]) -> Tensor:
        if parts_device.type == "cpu" and sum(tensor.numel() for tensor in jobs[part[0]]) >= _LARGE:
            return _search(jobs[part[0]], q)
        return _lowest(torch.stack([_magnitudes(jobs[j]) for j in part]), q)

    result = torch.zeros(len(jobs), 2, dtype=torch.float64)
    for parts_device, own in parts.items():
        found = in_threads(measure, own) if parts_device.type == "cpu" else list(map(measure, own))
        result[[j for part in own for j in part]] = torch.cat(found).cpu()
    return result


def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """The real dtype that norms of tensors of this dtype have."""
    return torch.float64 if compute_dtype(dtype) in (torch.float64, torch.complex128) else torch.float32


def check_quantile(q: float) -> None:
    """SurgeryError unless q is in [0, 1]."""
    if not isinstance(q, Real) or not 0 <= q <= 1:
        raise SurgeryError(f"q must be a quantile in [0, 1], got {repr(q)[:40]}")


def _common(job: Sequence[Tensor]) -> torch.dtype:
    """The dtype that a job's magnitudes are compared in."""
    return max((norm_dtype(tensor.dtype) for tensor in job), key=lambda dtype: dtype.itemsize)


def _magnitudes(job: Sequence[Tensor]) -> Tensor:
    """[n], new memory, on the first tensor's device."""
    device, dtype = job[0].device, _common(job)
    return torch.cat([tensor.reshape(-1).abs().to(device, dtype) for tensor in job])


def _rank(n: int, q: float) -> int:
    """The position of the threshold among n sorted magnitudes."""
    # A Fraction, because 0.29 * 100 must be 29; in floating point it is a little less.
    return math.floor(Fraction(repr(float(q))) * (n - 1))


def _lowest(magnitudes: Tensor, q: float) -> Tensor:
    """[R, n] -> [R, 2] on the same device, as in `joint_norms`. `magnitudes` may be reordered."""
    rank = _rank(magnitudes.shape[1], q)
    if magnitudes.device.type == "cpu":
        # NumPy's selection is ten times as fast as kthvalue. NaN and infinity end up at the rank or behind it.
        magnitudes.numpy().partition(rank, axis=1)
        edge, rest = magnitudes[:, rank].double(), magnitudes[:, rank:]
        ties = (rest == rest[:, :1]).sum(1)  # the threshold itself, and equal entries behind the rank
        norms, counts = (_norm(magnitudes[:, :rank]).square() + ties * edge.square()).sqrt(), rank + ties
        finite = rest.isfinite().all(1)
    else:
        edge = magnitudes.kthvalue(rank + 1, dim=1, keepdim=True).values
        inside = magnitudes <= edge
        norms, counts, finite = _norm(magnitudes.where(inside, 0)), inside.sum(1), magnitudes.isfinite().all(1)
    return torch.stack([norms.where(finite, torch.nan), counts.where(finite, 0).double()], 1)


def _search(job: Sequence[Tensor], q: float) -> Tensor:
    """`_lowest` of one large job on the CPU: [1, 2], in one pass, without a copy.

    A sample shows between which two magnitudes the threshold should lie. Entries below these are only counted and
    squared; the few in between are gathered, and the threshold is selected among them. The counts show whether it
    really lies there. If not, or if the sum would lose digits, the job is done like small tensors.
    """
    arrays = [_flat(tensor, _common(job)) for tensor in job]
    n, kind = sum(array.size for array in arrays), arrays[0].dtype
    rank = _rank(n, q)
    stride = 6 * math.ceil(n ** (1 / 3) / 8) - 1  # few to sort, few in between; not divisible by 2 or 3
    sample = np.abs(np.concatenate([array[::stride] for array in arrays]))
    middle, spread = rank / n * sample.size, 3 * math.sqrt(sample.size * q * (1 - q)) + 1
    first, last = math.floor(middle - spread), math.ceil(middle + spread)
    sample.partition(min(last, sample.size - 1))
    sample[:last].partition(max(first, 0))
    low = sample[first] if first >= 0 else kind.type(0)
    high = sample[last] if last < sample.size else kind.type(np.inf)
    limits = np.finfo(kind)
    if not (low == 0 or math.sqrt(limits.tiny) * 1e3 < low < math.sqrt(limits.max) / 1e3) or high == limits.max:
        return _lowest(_magnitudes(job)[None], q)  # squares would overflow or underflow
    high = np.nextafter(high, kind.type(np.inf))  # entries that equal the sampled bound are in between, too
    sizes, flags = np.empty(_CHUNK, kind), np.empty((2, _CHUNK), bool)
    most, rows = np.full(_ROW, low), sizes.reshape(-1, _ROW)
    top, number, squares, between = kind.type(0), 0, [], []
    for part in (array[start : start + _CHUNK] for array in arrays for start in range(0, array.size, _CHUNK)):
        if part.size < _CHUNK:
            sizes.fill(0)
        x, (above, beyond) = sizes[: part.size], flags[:, : part.size]
        np.abs(part, out=x)
        top = np.maximum(top, x.max())
        np.greater_equal(x, low, out=above)
        number += np.count_nonzero(above)
        np.greater_equal(x, high, out=beyond)
        between.append(x.compress(np.not_equal(above, beyond, out=beyond)))  # several times as fast as x[mask]
        np.minimum(rows, most, out=rows)
        squares.append(np.matmul(rows[:, None, :], rows[:, :, None]))
    total = float(np.concatenate(squares).sum(dtype=np.float64))
    found, place = np.concatenate(between), rank - (n - number)
    if not (np.isfinite(top) and 0 <= place < found.size):
        return _lowest(_magnitudes(job)[None], q)
    found.partition(place)
    ties = np.count_nonzero(found[place:] == found[place])
    inside = total - number * float(low) ** 2  # the squares below `low`
    inside += np.einsum("i,i", found[:place], found[:place], dtype=np.float64) + ties * float(found[place]) ** 2
    if inside < total / 4:
        return _lowest(_magnitudes(job)[None], q)
    return torch.tensor([[math.sqrt(inside), rank + ties]], dtype=torch.float64)


def _flat(tensor: Tensor, dtype: torch.dtype) -> np.ndarray:
    """The entries in the order in which they lie in memory; not copied if they are dense and have the dtype."""
    dense = tensor.permute(sorted(range(tensor.ndim), key=lambda axis: -tensor.stride(axis))).reshape(-1)
    return (dense.abs() if dense.is_complex() or dense.is_neg() else dense).to("cpu", dtype).numpy()


def _norm(rows: Tensor) -> Tensor:
    """[R, n] -> [R], summed in float64, without a float64 copy of the whole tensor."""
    chunks = [torch.linalg.vector_norm(chunk.double(), dim=1) for chunk in rows.split(_CHUNK, 1)]
    return torch.linalg.vector_norm(torch.stack(chunks), dim=0)
