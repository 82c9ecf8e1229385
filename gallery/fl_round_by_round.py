"""A federation made by hand, round by round

You bring data, clients and model, and call each round yourself, so you can look at every model that a client sends.
"""

import matplotlib.pyplot as plt
import torch

import fl
import surgery
import zoo
from fl.algorithms.fedavg import METHOD as fedavg
from fl.partition import Split

data, none = fl.Config().load(), torch.tensor([], dtype=torch.int64)
clients = [Split(((data.y - 2 * k) % 10 < 4).nonzero().flatten(), none, none) for k in range(5)]
model = zoo.create("cnn", torch.Generator().manual_seed(0), in_channels=1, image_size=8, width=0.25)
fed = fl.Federation(model, data, clients, participants=5, local=fl.LocalTraining(epochs=3, batch_size=20))
method: fl.Algorithm = fedavg(fed)
server: fl.Server = method.init()
figure, axes = plt.subplots(1, 3, figsize=(8, 3), layout="constrained", sharey=True)
for number, axis in enumerate(axes, start=1):
    rng = fl.Rng(seed=0, round=number)
    start, (server, update) = server["global"], method.round(server, method.choose(server, rng), rng)
    right = (method.predict(server, data.test_x, None).argmax(1) == data.test_y).float().mean()
    moved = surgery.cosine({name: t - start[name] for name, t in update.received.items()})
    image = axis.imshow(moved, cmap="RdBu", vmin=-1, vmax=1)
    axis.set(title=f"round {number}\n{right:.0%} right", xlabel="client", ylabel="client")
print("samples of the clients:", update.sizes)
figure.colorbar(image, ax=figure.axes, label="cosine of two clients'\nsteps"), plt.show()
