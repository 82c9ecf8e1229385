"""Narrow a timm model and fine-tune it

A ResNet learns digits, loses half of every width, and is fine-tuned. A few steps bring back most of the accuracy.
"""

import matplotlib.pyplot as plt
import timm
import torch
from sklearn.datasets import load_digits

import surgery

torch.manual_seed(0)
x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x, accuracy = torch.nn.functional.interpolate(x.view(-1, 1, 8, 8).float() / 16, size=16), []
net = timm.create_model("resnet18", channels=(16, 32, 64, 128), in_chans=1, num_classes=10)
for step in range(81):
    if step in (0, 50):
        net = surgery.narrow(net, 0.5, x[:2])[0] if step else net
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.003)
        print(f"step {step}: {sum(p.numel() for p in net.parameters()):,} parameters")
    if step % 5 == 0:
        accuracy.append(100 * (net.eval()(x[1500:]).argmax(1) == y[1500:]).float().mean().item())
    batch = torch.randint(1500, (32,))
    torch.nn.functional.cross_entropy(net.train()(x[batch]), y[batch]).backward()
    optimizer.step(), optimizer.zero_grad()
plt.figure(figsize=(6, 4), layout="constrained").gca().set(
    title="A ResNet, cut in half", xlabel="step", ylabel="accuracy, %"
)
plt.plot(range(0, 81, 5), accuracy, "o-"), plt.axvline(50, color="0.6", ls="--", label="cut"), plt.legend(), plt.show()
