"""Your own model, and parts of it for weak clients

Any module that returns logits can be trained. Clients with half of its width get their models cut out of it.
"""

import matplotlib.pyplot as plt
from torch import nn

import fl


def perceptron():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


mix = fl.ArchitectureOptions(widths=(0.25, 0.5, 1.0), choose="cycle")
settings = {"fedavg": {}, "heterofl": {"architectures": mix}, "fedfa": {"architectures": mix}}
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for name, more in settings.items():
    rows = []
    config = fl.Config.of(algorithm=name, rounds=15, **more)
    fl.simulate(config, f"runs/own-model-{name}", model=perceptron, on_round=rows.append)
    label = f"{name}, {'widths 1/4, 1/2, 1' if more else 'all the whole model'}"
    print(f"{label}: {rows[-1]['accuracy']:.1%}")
    axis.plot([row["round"] for row in rows], [100 * row["accuracy"] for row in rows], label=label)
axis.set(title="A model of your own", xticks=range(0, 16, 5), xlabel="round", ylabel="test accuracy, %")
axis.legend()
plt.show()
