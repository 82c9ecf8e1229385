"""States that are read when they are asked for."""

import pytest
import torch

from surgery import SurgeryError, lazy


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_number_that_a_type_cannot_hold_is_refused_and_infinities_stay(dtype):
    values = {"a": torch.tensor([1.0, -1e5]), "b": torch.tensor([1.0, float("nan")]), "c": torch.ones(0)}
    values["d"] = torch.tensor(-float("inf"))
    narrow = lazy.cast(values, dtype)
    with pytest.raises(SurgeryError, match="'a' holds -100000, too large for"):
        narrow["a"]
    assert narrow["b"].float().isnan().tolist() == [False, True]
    assert narrow["c"].dtype is dtype
    if dtype is torch.float8_e4m3fn:  # it has no infinities
        with pytest.raises(SurgeryError, match="'d' holds -inf, too large for"):
            narrow["d"]
    else:
        assert narrow["d"].float().isneginf()


def test_double_precision_is_judged_as_it_is_and_no_data_not_at_all():
    large = {"a": torch.tensor([1.0, 1e300], dtype=torch.float64)}
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(SurgeryError, match=r"'a' holds 1e\+300, too large for"):
            lazy.cast(large, dtype)["a"]
    assert lazy.cast({"a": torch.ones(2, device="meta")}, torch.float16)["a"].dtype is torch.float16
