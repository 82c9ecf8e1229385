"""Attack and defend

A fifth of the clients train on shuffled labels and enlarge their updates. The server clips, or takes the median.
"""

import matplotlib.pyplot as plt

import fl
from fl.extensions.attack import AttackOptions
from fl.extensions.defence import Defence

clients = {"partition": "iid", "participants": 10, "local_epochs": 2, "width": 0.25}
attack = AttackOptions(share=0.2, amplify=10.0)
cases = {
    "no attack": {},
    "attacked": {"attack": attack},
    "attacked, median": {"attack": attack, "defence": Defence(rule="median")},
    "attacked, clipped": {"attack": attack, "defence": Defence(clip=1.0)},
}
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for number, (label, settings) in enumerate(cases.items()):
    rows, config = [], fl.Config.of(algorithm="fedavg", rounds=5, **clients, **settings)
    fl.simulate(config, f"runs/attack{number}", on_round=rows.append)
    print(f"{label}: {rows[-1]['accuracy']:.1%}")
    axis.plot([row["round"] for row in rows], [100 * row["accuracy"] for row in rows], marker="o", label=label)
axis.set(title="A fifth of the clients is malicious", xticks=range(1, 6), xlabel="round", ylabel="test accuracy, %")
axis.legend()
plt.show()
