"""Average models as long as the score rises: a soup

Copies of a network train on at several rates. `greedy_soup` adds each to a mean unless the score would fall.
"""

import copy

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import surgery

torch.manual_seed(0)
x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x, nets = x.float() / 16, [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))]
for lr in (0.1, 0.3, 0.3, 0.3, 0.6, 0.6, 2.0):
    nets.append(copy.deepcopy(nets[min(1, len(nets) - 1)]))  # the first from the start, the others from the first
    optimizer = torch.optim.SGD(nets[-1].parameters(), lr=lr)
    for batch in torch.randint(1000, (100, 16)):
        torch.nn.functional.cross_entropy(nets[-1](x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
held, labels, net = x[1000:1400], y[1000:1400], nets.pop(0)
soup = surgery.merging.greedy_soup(nets, score=lambda s: (surgery.load(net, s)(held).argmax(1) == labels).sum().item())
print(f"models {soup.taken} are taken: {soup.score} of 400 are right, {max(soup.scores)} of the best alone")
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
axis.bar(range(7), soup.scores, color=["C0" if k in soup.taken else "0.7" for k in range(7)])
axis.axhline(soup.score, color="C1", label="soup of the blue ones"), figure.legend(loc="outside lower center")
axis.set(title="A soup of seven models", xlabel="model", ylabel="right, of 400", ylim=(0, 400)), plt.show()
