"""Teach surgery an operation of your own

An operation without a rule fixes the axes that it touches. A rule says which axes are the same, so the width shrinks.
"""

import matplotlib.pyplot as plt
import torch

import surgery


@torch.library.custom_op("gallery::centred", mutates_args=())
def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


class Centre(torch.nn.Module):
    def forward(self, x):
        return centred(x)


net, example = torch.nn.Sequential(torch.nn.Linear(16, 64), Centre(), torch.nn.Linear(64, 4)), torch.zeros(2, 16)
try:
    surgery.narrow(net, 0.5, example)
except surgery.SurgeryError as error:
    print(error)
surgery.register_rule("gallery::centred", "x: n c -> n c")  # the axes stay
left = {f"{rate:.0%}": surgery.narrow(net, rate, example)[0][0].out_features for rate in (0.25, 0.5, 0.75, 1.0)}
plt.bar([*left], 64, color="0.8", label="without a rule"), plt.bar([*left], [*left.values()], label="with a rule")
plt.xlabel("width asked for"), plt.ylabel("features left"), plt.ylim(0, 80), plt.legend(ncols=2), plt.show()
