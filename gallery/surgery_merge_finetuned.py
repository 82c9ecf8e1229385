"""Merge two fine-tuned models

Two copies of a network learn on, one digits 0 to 4, the other 5 to 9. A merge of both knows more than either.
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
for mine, steps in ((y < 10, 50), (y < 5, 100), (y >= 5, 100)):
    net = copy.deepcopy(trained[0] if trained else net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in torch.randint(int(mine[:1300].sum()), (steps, 64)):
        torch.nn.functional.cross_entropy(net(x[mine][batch]), y[mine][batch]).backward()
        optimizer.step(), optimizer.zero_grad()
    trained.append(net)
found = dict(zip(("base", "0 to 4", "5 to 9"), trained))
found |= {"slerp": merging.slerp(trained[1:]), "ties": merging.ties(trained[1:], base=trained[0])}
right = [100 * (load(net, one)(x[1300:]).argmax(1) == y[1300:]).float().mean().item() for one in found.values()]
print({name: f"{share:.1f} %" for name, share in zip(found, right)})
plt.bar_label(plt.bar(list(found), right, color=["0.6", "0.6", "0.6", "C0", "C0"]), fmt="%.0f")
plt.title("Two fine-tuned models, merged"), plt.ylabel("test accuracy on all digits, %"), plt.ylim(0, 100), plt.show()
