"""Cut a vocabulary, and grow it again

A model of characters is cut to a corpus' characters, whose logits stay the same. Then it gets new tokens.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import surgery

torch.manual_seed(0)
text = "the plan says where the small model lies in the full one. "
net = nn.Sequential(nn.Embedding(128, 24), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 128))
codes = torch.tensor([ord(letter) for letter in text])
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(150):
    optimizer.zero_grad(), nn.functional.cross_entropy(net(codes[:-1]), codes[1:]).backward(), optimizer.step()
kept = sorted(set(codes.tolist()))
small, plan, _ = surgery.vocabulary.keep(net, kept)
letters = torch.arange(len(kept))
print(small, torch.allclose(small(letters), net(torch.tensor(kept))[:, kept]), sep="\n")
large, _, _ = surgery.vocabulary.grow(small, len(kept) + 2, rows=[[0], [1, 2]])
print(large[0], torch.allclose(large(letters)[:, : len(kept)], small(letters)))
figure, axis = plt.subplots(figsize=(6, 5), layout="constrained")
names = ["space" if code == 32 else chr(code) for code in kept]
axis.imshow(small(letters).softmax(1).detach())
axis.set_xticks(letters, names, rotation=90), axis.set_yticks(letters, names)
axis.set(title=f"{len(kept)} of 128 tokens: which follows which", xlabel="next", ylabel="token")
plt.show()
