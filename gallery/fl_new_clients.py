"""New clients: accuracy against their samples

Clients that join after training fine-tune FedAvg's global model on a few samples of their own.
"""

import matplotlib.pyplot as plt
import torch

import fl

data = fl.Config().load()
old, new = data.y < 7, torch.arange(len(data.y)) % 2 == 0
old &= ~new
known = fl.Dataset.from_arrays(data.x[old], data.y[old], data.test_x, data.test_y, classes=10, top=16)
owners = torch.arange(int(new.sum())) % 6
others = fl.Dataset.from_arrays(data.x[new], data.y[new], data.test_x, data.test_y, owners, top=16)
config = fl.Config.of(algorithm="fedavg", clients=10, rounds=15, local_epochs=2, width=0.25, failures={"share": 0.2})
fl.simulate(config, "runs/before-new-clients", dataset=known)
sizes = [5, 10, 20, 40, 80]
results = fl.personalize("runs/before-new-clients", others, epochs=10, samples=sizes, held_out=0.25)
print(results)
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for when in ("before", "after"):
    rows = [[100 * r[f"accuracy_{when}"] for r in results.rows if r["samples"] == n] for n in sizes]
    axis.plot(sizes, [sum(row) / len(row) for row in rows], marker="o", label=f"{when} fine-tuning")
    axis.fill_between(sizes, [min(row) for row in rows], [max(row) for row in rows], alpha=0.2)
axis.set(title="Six new clients with three unknown classes", xlabel="own samples", ylabel="accuracy, %", xscale="log")
axis.set_xticks(sizes, sizes), axis.minorticks_off(), axis.legend()
plt.show()
