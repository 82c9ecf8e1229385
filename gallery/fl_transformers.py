"""A model of transformers, trained as it is

A Vision Transformer of Hugging Face takes digits, and returns an object with logits. It needs no wrapper.
"""

import matplotlib.pyplot as plt
import torch
from transformers import ViTConfig, ViTForImageClassification

import fl

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
dropout = {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1}
images = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
net = ViTForImageClassification(ViTConfig(**images, **sizes, **dropout))
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
rows: list = []
config = fl.Config.of(algorithm="fedavg", rounds=12, clients=8, optimizer="adam", lr=0.005, partition="iid")
fl.simulate(config, "runs/fedavg", model=net, on_round=rows.append)
axis.plot([row["round"] for row in rows], [100 * row["accuracy"] for row in rows], "o-")
trained = fl.load_model("runs/fedavg", model=net)
trained.save_pretrained("trained")
again = ViTForImageClassification.from_pretrained("trained")
data = config.load()
x, y = data.normalise(data.test_x), data.test_y
print(f"{(again(x).logits.argmax(1) == y).float().mean():.1%} right after save_pretrained and from_pretrained")
axis.set(title="A Vision Transformer of transformers", xlabel="round", ylabel="test accuracy, %")
plt.show()
