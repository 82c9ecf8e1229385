"""Resume a run

A run that was stopped after any round resumes, and ends with the same bits as a run that was never stopped.
"""

import matplotlib.pyplot as plt
import torch

import fl

config = fl.Config.of(algorithm="fedavg", partition="iid", rounds=10, local_epochs=1)
rows = {"stopped": [], "resumed": [], "whole": []}
fl.simulate(config, "runs/stopped", on_round=lambda row: rows["stopped"].append(row) or row["round"] == 5)
fl.simulate(config, "runs/stopped", resume=True, on_round=rows["resumed"].append)
fl.simulate(config, "runs/whole", on_round=rows["whole"].append)
resumed, whole = fl.load_model("runs/stopped").state_dict(), fl.load_model("runs/whole").state_dict()
print("the same bits:", all(torch.equal(resumed[name], whole[name]) for name in whole))
try:
    fl.simulate(config, "runs/stopped")
except fl.FLError as error:
    print("nothing is overwritten:", error)
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for (label, some), look in zip(rows.items(), ("o", "s", "k-")):
    axis.plot([row["round"] for row in some], [100 * row["accuracy"] for row in some], look, label=label)
axis.set(title="Stopped after round 5, and resumed", xlabel="round", ylabel="test accuracy, %")
axis.legend()
plt.show()
