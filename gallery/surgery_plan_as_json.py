"""A plan as JSON: extract and embed

A plan says where a narrow model lies in a wide one. Saved and loaded again, it extracts the model and embeds it.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import surgery

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
x = torch.zeros(1, 12)
small, plan = surgery.narrow(net, 0.5, x, scores=surgery.pruning.importance(net, example=x, by="l2"))
print(plan.to_json()[:300], "...")
plan.save("plan.json")
plan = surgery.Plan.load("plan.json")
cut = plan.extract(surgery.state(net))
full, mask = plan.embed(cut)
print(all(torch.equal(cut[name], tensor) for name, tensor in surgery.state(small).items()), sorted(cut))
figure, axes = plt.subplots(2, 3, figsize=(7, 4), layout="constrained")
for (above, below), name in zip(axes.T, ("0.weight", "2.weight", "4.weight")):
    above.imshow(surgery.state(net)[name], cmap="RdBu", vmin=-0.3, vmax=0.3, aspect="auto")
    below.imshow(full[name].where(mask[name], torch.nan), cmap="RdBu", vmin=-0.3, vmax=0.3, aspect="auto")
    above.set(title=name), below.set(xlabel="inputs")
axes[0, 0].set_ylabel("the model"), axes[1, 0].set_ylabel("extracted,\nand embedded")
figure.suptitle("Where the narrow model lies in the wide one")
plt.show()
