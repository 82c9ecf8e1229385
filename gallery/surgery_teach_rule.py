"""Teach surgery an operation of your own

An operation that it does not know fixes what it touches. A rule says which axes are the same, and the width shrinks.
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
left = {rate: surgery.narrow(net, rate, example)[0][0].out_features for rate in (0.25, 0.5, 0.75, 1.0)}
plt.axhline(64, color="0.6", ls="--", label="without a rule"), plt.plot(*zip(*left.items()), "o-", label="with a rule")
plt.title("An operation of your own"), plt.xlabel("asked for"), plt.ylabel("positions left"), plt.legend(), plt.show()
