"""Several methods, several seeds

One call trains all methods on the same partitions. The results print as a table, and hold the rows for a figure.
"""

import matplotlib.pyplot as plt
from torch import nn

import fl

net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
methods, few = ("fedavg", "scaffold"), {"rounds": 15, "alpha": 0.1, "momentum": 0.0, "local_epochs": 2}
fl.simulate_all(fl.Experiment.of(algorithms=methods, seeds=(0, 1), **few), "runs/several", model=net)
results: fl.Results = fl.results("runs/several")  # works in another program, too
print(results)

figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for look, method in zip(("C0-", "C1--"), methods):
    for run in results.runs:
        if run.config.method.name == method:
            label = method if run.config.seed == 0 else None
            accuracies = [100 * row["accuracy"] for row in run.rows]
            axis.plot(range(1, len(accuracies) + 1), accuracies, look, label=label)
axis.set(title="Labels differ: two methods, two seeds", xlabel="round", ylabel="test accuracy, %")
axis.legend()
plt.show()
