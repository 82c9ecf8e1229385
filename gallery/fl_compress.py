"""Send a hundredth of an update

Clients send only the largest entries of their updates. Adding the rest to the next update regains most accuracy.
"""

import matplotlib.pyplot as plt
import torch

import fl
from fl.extensions.compression import Compression

clients = {"partition": "shards", "clients": 20, "participants": 20, "local_epochs": 1, "lr": 0.01}
cases = {
    "all of it": Compression(),
    "4 bits an entry": Compression("quantise", bits=4),
    "1 % of the entries": Compression("topk", share=0.01),
    "1 %, the rest remembered": Compression("topk", share=0.01, feedback=True),
}
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for number, (label, compression) in enumerate(cases.items()):
    rows, config = [], fl.Config.of(algorithm="fedavg", rounds=40, eval_every=4, compression=compression, **clients)
    fl.simulate(config, f"runs/compress{number}", model=net, on_round=rows.append)
    rounds, accuracies = zip(*((row["round"], 100 * row["accuracy"]) for row in rows if "accuracy" in row))
    print(f"{label}: {rows[-1]['bytes_up']:,.0f} bytes a round, {accuracies[-1]:.1f}%")
    axis.plot(rounds, accuracies, marker="o", label=label)
axis.set(title="What clients send", xlabel="round", ylabel="test accuracy, %")
axis.legend()
plt.show()
