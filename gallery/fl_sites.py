"""Each site left out once

Sites train and test on their own rows. Then the model is tested on the site that was left out.
"""

import matplotlib.pyplot as plt
import numpy as np
from torch import nn

import fl

rng, sites = np.random.default_rng(0), ["bern", "lima", "oslo", "quito"]
owners = np.repeat(sites, 150)
shift = np.repeat([[0.0, 0.0], [0.4, 0.2], [0.2, 0.6], [2.5, -1.0]], 150, axis=0)  # quito measures differently
y, test = rng.integers(0, 2, 600), np.arange(600) % 5 == 0
x = rng.normal(size=(600, 2)) + 2 * y[:, None] + shift
data = fl.Dataset.from_arrays(x[~test], y[~test], x[test], y[test], owners[~test], test_owners=owners[test])
print(data)
trained_on, left_out = [], []
for site in sites:
    config = fl.Config.of(algorithm="fedavg", partition="natural", clients=3, rounds=5, test_sites=(site,))
    final = fl.simulate(config, f"runs/without-{site}", dataset=data, model=nn.Linear(2, 2))["final"]
    trained_on.append(100 * final["local_test_accuracy"])
    left_out.append(100 * final[f"test_accuracy_{site}"])
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
axis.bar(np.arange(4) - 0.2, trained_on, 0.4, label="sites that trained")
axis.bar(np.arange(4) + 0.2, left_out, 0.4, label="the site that was left out")
axis.set(xticks=range(4), xticklabels=sites, xlabel="site left out", ylabel="accuracy, %", ylim=(0, 100))
figure.legend(loc="outside upper center", ncols=2)
plt.show()
