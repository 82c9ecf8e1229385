"""A table with a row for each patient

`fl.Dataset.from_pandas` says which columns hold the target and the owner. Each hospital tests on its own rows.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer
from torch import nn

import fl

frame = load_breast_cancer(as_frame=True).frame
frame.iloc[:, :30] = frame.iloc[:, :30].apply(lambda column: (column - column.mean()) / column.std())
frame["target"] = frame["target"].map({0: "malignant", 1: "benign"})
rng = np.random.default_rng(0)
sites, share = ["bern", "lima", "oslo", "quito"], [0.5, 0.3, 0.12, 0.08]  # the table does not name hospitals
frame["hospital"] = rng.choice(sites, len(frame), p=share)
frame["part"] = np.where(rng.random(len(frame)) < 0.4, "test", "train")
data = fl.Dataset.from_pandas(frame, target="target", owner="hospital", split="part")
print(data)
axis = plt.subplots(figsize=(6, 4), layout="constrained")[1]
for at, method in enumerate(("local", "fedavg")):
    config = fl.Config.of(algorithm=method, partition="natural", clients=4, participants=4, min_samples=5, rounds=10)
    fl.simulate(config, f"runs/{method}", dataset=data, model=nn.Linear(30, 2))
    table = pd.read_csv(f"runs/{method}/clients.csv").groupby("client", as_index=False).last()
    axis.bar(np.arange(4) + 0.4 * at, 100 * table["test_accuracy"], 0.4, label=method)
axis.set(xticks=np.arange(4) + 0.2, xticklabels=table["owner"], ylabel="accuracy on own test rows, %", ylim=(80, 105))
axis.legend(loc="upper left", ncols=2), plt.show()
