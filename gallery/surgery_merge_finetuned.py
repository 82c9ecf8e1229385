"""Merge two fine-tuned models

Two copies of a network are fine-tuned, one on digits 0 to 4, the other on 5 to 9. A merge knows more than either.
"""

import copy

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

from surgery import load, merging

torch.manual_seed(0)
x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x, trained = x.float() / 16, []
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
for subset, steps in ((y < 10, 50), (y < 5, 100), (y >= 5, 100)):
    net = copy.deepcopy(trained[0] if trained else net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in torch.randint(int(subset[:1300].sum()), (steps, 64)):
        torch.nn.functional.cross_entropy(net(x[subset][batch]), y[subset][batch]).backward()
        optimizer.step(), optimizer.zero_grad()
    trained.append(net)
models = dict(zip(("base", "0 to 4", "5 to 9"), trained))
models |= {"slerp": merging.slerp(trained[1:]), "ties": merging.ties(trained[1:], base=trained[0])}
right = [100 * (load(net, model)(x[1300:]).argmax(1) == y[1300:]).float().mean().item() for model in models.values()]
print({name: f"{share:.1f} %" for name, share in zip(models, right)})
plt.bar_label(plt.bar(list(models), right, color=["0.6", "0.6", "0.6", "C0", "C0"]), fmt="%.0f")
plt.title("Two fine-tuned models, merged"), plt.ylabel("test accuracy on all digits, %"), plt.ylim(0, 100), plt.show()
