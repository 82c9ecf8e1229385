"""Models of unequal width, merged where they match

A network of 192 units a layer, laid into one of 256: in the first positions of each width, or where `fit` finds that it
matches, without a hill between. At the right the other 64 units are still there, others in each plan.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import surgery

x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
x, nets = x.float() / 16, []
for seed, n in enumerate((256, 192)):
    torch.manual_seed(seed)
    layers = [nn.Linear(64, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 10)]
    nets.append(nn.Sequential(*layers))
    optimizer = torch.optim.Adam(nets[-1].parameters(), 3e-3)
    for batch in torch.randint(1400, (400, 64)):
        nn.functional.cross_entropy(nets[-1](x[batch]), y[batch]).backward()
        optimizer.step(), optimizer.zero_grad()
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for label, plan in {"corner": surgery.corner(*nets)[1], "fit": surgery.fit(*nets, example=x[:2])}.items():
    ends, path = [nets[0], plan.embed(nets[1], into=nets[0])[0]], torch.linspace(0, 1, 11).tolist()
    calls = [torch.func.functional_call(nets[0], surgery.average(ends, weights=[1 - t, t]), (x[1400:],)) for t in path]
    axis.plot(path, [nn.functional.cross_entropy(logits, y[1400:]).item() for logits in calls], "o-", label=label)
axis.set_title("From 256 units a layer to 192")
axis.set(xlabel="share of the small network, laid into the large one", ylabel="test loss"), axis.legend(), plt.show()
