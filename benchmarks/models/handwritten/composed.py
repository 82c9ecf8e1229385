"""Models of several parts: towers, autoencoders, graphs, fields; and inputs that are not a tensor."""

from collections import UserDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.case import scaled


class TwoTowers(nn.Module):
    """A tower for users, one for items; the score is their inner product."""

    def __init__(self, s: int):
        super().__init__()
        self.users, self.items = nn.Embedding(20, 9 * s), nn.Embedding(30, 11 * s)
        self.left = nn.Sequential(nn.Linear(9 * s + 7, 13 * s), nn.ReLU(), nn.Linear(13 * s, 6 * s))
        self.right = nn.Sequential(nn.Linear(11 * s, 14 * s), nn.ReLU(), nn.Linear(14 * s, 6 * s))

    def forward(self, user: Tensor, features: Tensor, item: Tensor) -> Tensor:
        left = self.left(torch.cat((self.users(user), features), dim=-1))
        return (left * self.right(self.items(item))).sum(-1)


class Siamese(nn.Module):
    """One net for two images, compared by cosine similarity."""

    def __init__(self, s: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 6 * s, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24 * s, 10 * s)
        )

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.cosine_similarity(self.net(a), self.net(b))


class Contrastive(nn.Module):
    """SimCLR: a projector, normalised vectors, and a matrix of similarities."""

    def __init__(self, s: int):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(7, 12 * s), nn.BatchNorm1d(12 * s), nn.ReLU(), nn.Linear(12 * s, 10 * s))
        self.projector = nn.Sequential(nn.Linear(10 * s, 9 * s), nn.ReLU(), nn.Linear(9 * s, 8 * s))

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.projector(self.encoder(x)), dim=-1)
        return z @ z.T / 0.5


class Graph(nn.Module):
    """Two graph convolutions with a dense, normalised adjacency."""

    def __init__(self, s: int):
        super().__init__()
        self.first, self.second = nn.Linear(7, 12 * s, bias=False), nn.Linear(12 * s, 5, bias=False)
        self.bias = nn.Parameter(torch.zeros(12 * s))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        adjacency = adjacency + torch.eye(len(adjacency))
        degree = adjacency.sum(-1).rsqrt()
        adjacency = degree[:, None] * adjacency * degree
        return adjacency @ self.second(F.relu(adjacency @ self.first(x) + self.bias))


class Edges(nn.Module):
    """Message passing along a list of edges, gathered and summed by index_add."""

    def __init__(self, s: int):
        super().__init__()
        self.embed, self.message = nn.Linear(7, 12 * s), nn.Linear(24 * s, 10 * s)
        self.update, self.head = nn.Linear(22 * s, 12 * s), nn.Linear(12 * s, 5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x, (source, target) = F.relu(self.embed(x)), edges
        messages = F.relu(self.message(torch.cat((x[source], x[target]), dim=-1)))
        total = torch.zeros(len(x), messages.shape[-1]).index_add(0, target, messages)
        return self.head(x + self.update(torch.cat((x, total), dim=-1)))


class Autoencoder(nn.Module):
    """Returns the reconstruction and the code."""

    def __init__(self, s: int):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(9, 12 * s), nn.ReLU(), nn.Linear(12 * s, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 11 * s), nn.ReLU(), nn.Linear(11 * s, 9))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        return self.decoder(z), z


class Variational(nn.Module):
    """Mean and variance by chunk, noise, and a code whose width is hidden."""

    def __init__(self, s: int):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(9, 12 * s), nn.ReLU(), nn.Linear(12 * s, 2 * 5 * s))
        self.decoder = nn.Sequential(nn.Linear(5 * s, 11 * s), nn.ReLU(), nn.Linear(11 * s, 9))

    def forward(self, x: Tensor) -> Tensor:
        mean, log = self.encoder(x).chunk(2, dim=-1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + noise * (log / 2).exp())


class Quantized(nn.Module):
    """VQ-VAE: the code becomes its nearest neighbour in a codebook, with a straight-through gradient."""

    def __init__(self, s: int):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(9, 12 * s), nn.ReLU(), nn.Linear(12 * s, 5 * s))
        self.codebook = nn.Embedding(16, 5 * s)
        self.decoder = nn.Sequential(nn.Linear(5 * s, 11 * s), nn.ReLU(), nn.Linear(11 * s, 9))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        code = self.codebook(torch.cdist(z, self.codebook.weight).argmin(-1))
        return self.decoder(z + (code - z).detach())


class Field(nn.Module):
    """NeRF: sines of the position, a skip that concatenates the input again, density and colour."""

    def __init__(self, s: int):
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(4), persistent=False)
        self.first, self.layers = nn.Linear(24, 12 * s), nn.ModuleList()
        for i in range(4):
            self.layers.append(nn.Linear(12 * s + (24 if i == 2 else 0), 12 * s))
        self.density, self.feature = nn.Linear(12 * s, 1), nn.Linear(12 * s, 10 * s)
        self.colour = nn.Sequential(nn.Linear(10 * s + 3, 7 * s), nn.ReLU(), nn.Linear(7 * s, 3))

    def forward(self, position: Tensor, direction: Tensor) -> Tensor:
        angles = (position[..., None] * self.frequencies).flatten(-2)
        encoded = torch.cat((angles.sin(), angles.cos()), dim=-1)
        x = F.relu(self.first(encoded))
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(torch.cat((x, encoded), dim=-1) if i == 2 else x))
        colour = self.colour(torch.cat((self.feature(x), direction), dim=-1))
        return torch.cat((torch.sigmoid(colour), F.relu(self.density(x))), dim=-1)


class Actor(nn.Module):
    """An actor and critic on one trunk, which returns a distribution's logits and a value in a dict."""

    def __init__(self, s: int):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(7, 12 * s), nn.Tanh(), nn.Linear(12 * s, 10 * s), nn.Tanh())
        self.policy, self.value = nn.Linear(10 * s, 5), nn.Linear(10 * s, 1)
        self.log_std = nn.Parameter(torch.zeros(5))

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        x = self.trunk(observation)
        return {"logits": self.policy(x) * self.log_std.exp(), "value": self.value(x).squeeze(-1)}


class Dueling(nn.Module):
    """A dueling network: the value plus the centred advantages."""

    def __init__(self, s: int):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(7, 12 * s), nn.ReLU())
        self.value = nn.Sequential(nn.Linear(12 * s, 10 * s), nn.ReLU(), nn.Linear(10 * s, 1))
        self.advantage = nn.Sequential(nn.Linear(12 * s, 9 * s), nn.ReLU(), nn.Linear(9 * s, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(-1, keepdim=True)


class Tabular(nn.Module):
    """Embeddings of categories and numbers, concatenated; factorised interactions (DeepFM)."""

    def __init__(self, s: int):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 6 * s) for n in (5, 8, 11))
        self.numbers = nn.Linear(4, 6 * s)
        self.deep = nn.Sequential(nn.Linear(24 * s, 10 * s), nn.ReLU(), nn.Linear(10 * s, 1))

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        fields = [table(categories[:, i]) for i, table in enumerate(self.tables)] + [self.numbers(numbers)]
        stacked = torch.stack(fields, dim=1)
        pairs = 0.5 * (stacked.sum(1).square() - stacked.square().sum(1)).sum(-1, keepdim=True)
        return self.deep(stacked.flatten(1)) + pairs


class Keywords(nn.Module):
    """Takes keyword arguments, as tokenizers give them."""

    def __init__(self, s: int):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(30, 11 * s), nn.Linear(11 * s, 9 * s)
        self.head = nn.Linear(9 * s, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids) * attention_mask[..., None]
        return self.head(torch.relu(self.hidden(x.sum(1) / attention_mask.sum(1, keepdim=True))))


class OneDict(nn.Module):
    """Takes one positional argument, which is a dict."""

    def __init__(self, s: int):
        super().__init__()
        self.text, self.image = nn.Linear(7, 10 * s), nn.Linear(8, 6 * s)
        self.head = nn.Linear(16 * s, 5)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(torch.cat((self.text(batch["text"]).relu(), self.image(batch["image"]).relu()), dim=-1))


def _row() -> Tensor:
    return torch.randn(3, 7)


def _encoding() -> dict[str, Tensor]:
    mask = torch.ones(3, 10, dtype=torch.long)
    mask[1, 7:] = 0
    return {"input_ids": torch.randint(30, (3, 10)), "attention_mask": mask}


def _adjacency() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 7), (torch.rand(6, 6) > 0.5).float()


MODELS = {
    "two_towers": scaled(TwoTowers, lambda: (torch.randint(20, (3,)), torch.randn(3, 7), torch.randint(30, (3,)))),
    "siamese": scaled(Siamese, lambda: (torch.randn(3, 3, 8, 8), torch.randn(3, 3, 8, 8))),
    "contrastive": scaled(Contrastive, _row),
    "graph_convolution": scaled(Graph, _adjacency),
    "message_passing": scaled(Edges, lambda: (torch.randn(6, 7), torch.randint(6, (2, 13)))),
    "autoencoder": scaled(Autoencoder, lambda: torch.randn(4, 9)),
    "variational": scaled(Variational, lambda: torch.randn(4, 9)),
    "vq_vae": scaled(Quantized, lambda: torch.randn(4, 9)),
    "nerf": scaled(Field, lambda: (torch.randn(4, 3), torch.randn(4, 3))),
    "actor_critic": scaled(Actor, _row),
    "dueling": scaled(Dueling, _row),
    "deep_fm": scaled(
        Tabular, lambda: (torch.stack([torch.randint(n, (3,)) for n in (5, 8, 11)], dim=1), torch.randn(3, 4))
    ),
    "keywords": scaled(Keywords, _encoding),
    "batch_encoding": scaled(Keywords, lambda: UserDict(_encoding())),
    "one_dict": scaled(OneDict, lambda: ({"text": torch.randn(3, 7), "image": torch.randn(3, 8)},)),
}
