"""A model for each client: Ditto against local and global

Clients of four kinds test on data like their own. One model for all hardly suits them; a model for each does.
"""

import matplotlib.pyplot as plt

import fl

clients = {"clients": 12, "partition": "clusters", "clusters": (4,), "cluster_classes": (3,), "participation": 1.0}
held_out = {"pool_test_set": True, "local_valid": 0.15, "local_test": 0.2}
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for name, label in {"fedavg": "one model for all", "local": "each alone", "ditto": "Ditto"}.items():
    rows, config = [], fl.Config.of(algorithm=name, rounds=5, local_epochs=1, width=0.25, **clients, **held_out)
    fl.simulate(config, f"runs/personal-{name}", on_round=rows.append)
    accuracy = [100 * row["local_test_accuracy"] for row in rows]
    print(f"{label}: {accuracy[-1]:.1f} %")
    axis.plot([row["round"] for row in rows], accuracy, marker="o", label=label)
axis.set(title="Clients of four kinds", xlabel="round", ylabel="mean accuracy on own test data, %")
axis.set_xticks(range(1, 6)), axis.legend()
plt.show()
