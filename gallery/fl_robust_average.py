"""Robust averaging: mean, trimmed mean, median

Nine models agree up to noise, the tenth does not. The mean follows it; the trimmed mean and the median do not.
"""

import matplotlib.pyplot as plt
import torch

import surgery
import zoo
from fl.extensions.defence import Defence

draw = torch.Generator().manual_seed(0)
truth = surgery.state(zoo.create("lenet", draw))
models = surgery.broadcast(truth, 10)  # ten views of one model
models = {name: t + 0.01 * torch.randn(t.shape, generator=draw) for name, t in models.items()}
factors, errors = [1, 3, 10, 30, 100], {"mean": [], "trimmed mean": [], "median": []}
for factor in factors:
    sent = {name: torch.cat([t[:9], -factor * t[9:]]) for name, t in models.items()}
    averages = [rule.average(sent) for rule in (Defence(), Defence("trimmed", trim=0.1), Defence("median"))]
    for values, state in zip(errors.values(), averages):
        values.append(surgery.distance(surgery.stack([state]), surgery.stack([truth])).item())
print({name: round(values[-1], 2) for name, values in errors.items()})
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
[axis.loglog(factors, values, marker="o", label=name) for name, values in errors.items()]
axis.set(title="One of ten models is wrong", xlabel="length of the wrong model", ylabel="distance from the truth")
axis.legend(), plt.show()
