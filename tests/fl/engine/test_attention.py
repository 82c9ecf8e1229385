"""Several threads may compute attention as plain products; the switch is put back by the last of them."""

import torch

from fl.engine.precision import plain_attention


def test_the_last_to_leave_puts_the_switch_back():
    def fused():
        return torch.backends.cuda.flash_sdp_enabled()

    assert fused()
    plain_attention.__enter__()  # one thread comes,
    plain_attention.__enter__()  # another one,
    plain_attention.__exit__()  # and the first leaves before it
    assert not fused()
    plain_attention.__exit__()
    assert fused()
