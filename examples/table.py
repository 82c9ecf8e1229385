"""A table of numbers and a perceptron: `python examples/table.py`."""

from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch import nn

import fl

x, y = load_breast_cancer(return_X_y=True)
x, test_x, y, test_y = train_test_split(x, y, test_size=0.2, random_state=0)
mean, std = x.mean(0), x.std(0)
data = fl.Dataset.from_arrays((x - mean) / std, y, (test_x - mean) / std, test_y)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))


config = fl.Config.of(algorithm="fedavg", clients=10, rounds=10)
summary = fl.simulate(config, "runs/table", dataset=data, model=perceptron)
print(f"accuracy {summary['final']['accuracy']:.1%}")
print(fl.load_model("runs/table", model=perceptron))
