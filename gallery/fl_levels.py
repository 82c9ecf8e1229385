"""Levels of a structured population

FeMAM learns which clients are alike. It adds up one model for all, models for clusters, and one for each client.
"""

import matplotlib.pyplot as plt

import fl
from fl.algorithms.femam import FeMAMOptions

levels = FeMAMOptions(levels=("global", "3", "personal"), level_rounds=(4, 3))
held_out = {"pool_test_set": True, "local_valid": 0.15, "local_test": 0.2}
clients = {"clients": 20, "participation": 1.0, "partition": "clusters", "clusters": (3,), "width": 0.25}
fl.simulate(
    fl.Config.of(algorithm="femam", femam=levels, rounds=9, local_epochs=2, **clients, **held_out), "runs/levels"
)
trained = fl.Pathways.load("runs/levels")
print("models of client 0, level by level:", trained.pathway(0))
data = fl.Config().load()
newcomer = trained.join(data.normalise(data.test_x[:20]), data.test_y[:20])
print("a client who joins later:", trained.pathway(newcomer))
picture = plt.imread("runs/levels/structure.png")
plt.figure(figsize=(6, 6 * len(picture) / len(picture[0])))
plt.axes((0, 0, 1, 1)).imshow(picture)
plt.axis("off")
plt.show()
