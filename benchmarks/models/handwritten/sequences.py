"""Recurrent networks, state space models, text, mixtures of experts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.case import scaled


class Recurrent(nn.Module):
    """Two layers of LSTM or GRU over embedded tokens, and a head on the last step."""

    def __init__(self, s: int, kind: type[nn.RNNBase], both: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(30, 7 * s)
        self.rnn = kind(7 * s, 11 * s, num_layers=2, batch_first=True, bidirectional=both)
        self.head = nn.Linear(11 * s * (1 + both), 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(tokens))[0][:, -1])


class Cell(nn.Module):
    """nn.GRUCell in a Python loop that begins with zeros of a width kept as an attribute."""

    def __init__(self, s: int):
        super().__init__()
        self.width = 11 * s
        self.cell, self.head = nn.GRUCell(7, self.width), nn.Linear(self.width, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), self.width)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


class Bag(nn.Module):
    """Text classification by nn.EmbeddingBag with offsets."""

    def __init__(self, s: int):
        super().__init__()
        self.bag = nn.EmbeddingBag(30, 11 * s, mode="mean")
        self.head = nn.Sequential(nn.Linear(11 * s, 9 * s), nn.ReLU(), nn.Linear(9 * s, 5))

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(tokens, offsets))


class Scan(nn.Module):
    """A selective state space layer, as in Mamba, with the scan written as a loop."""

    def __init__(self, s: int):
        super().__init__()
        self.width, self.states, self.rank = 11 * s, 3 * s, 2 * s
        self.embed, self.into = nn.Linear(7, 9 * s), nn.Linear(9 * s, 2 * self.width)
        self.conv = nn.Conv1d(self.width, self.width, 3, padding=2, groups=self.width)
        self.select, self.step = nn.Linear(self.width, self.rank + 2 * self.states), nn.Linear(self.rank, self.width)
        self.log = nn.Parameter(torch.log(torch.arange(1.0, self.states + 1)).repeat(self.width, 1))
        self.skip, self.out = nn.Parameter(torch.ones(self.width)), nn.Linear(self.width, 9 * s)
        self.head = nn.Linear(9 * s, 5)

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.into(self.embed(x)).chunk(2, dim=-1)
        inner = F.silu(self.conv(inner.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        step, b, c = self.select(inner).split([self.rank, self.states, self.states], dim=-1)
        step = F.softplus(self.step(step))
        decay = torch.exp(-step[..., None] * self.log.exp())
        drive = (step * inner)[..., None] * b[:, :, None]
        h, found = torch.zeros_like(drive[:, 0]), []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + drive[:, t]
            found.append((h * c[:, t, None]).sum(-1))
        y = torch.stack(found, dim=1) + inner * self.skip
        return self.head(self.out(y * F.silu(gate)))


class Experts(nn.Module):
    """Four experts and what chooses among them."""

    def __init__(self, s: int):
        super().__init__()
        self.embed, self.gate = nn.Linear(7, 11 * s), nn.Linear(11 * s, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(11 * s, 13 * s), nn.SiLU(), nn.Linear(13 * s, 11 * s)) for _ in range(4)
        )
        self.head = nn.Linear(11 * s, 5)


class Mixture(Experts):
    """A mixture of experts: the two best of a softmax, weighted again; tokens are picked and added by index."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == number)
            result.index_add_(0, token, expert(flat[token]) * weights[token, rank, None])
        return self.head(x + result.view_as(x))


class Switch(Experts):
    """A switch transformer's layer: the best expert alone (`max`), all experts computed and masked."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            result = result + expert(x) * (weight * (chosen == number))[..., None]
        return self.head(x + result)


class StackedExperts(nn.Module):
    """A dense mixture whose experts' weights are one tensor: computed side by side, as heads are, all of them stay."""

    def __init__(self, s: int):
        super().__init__()
        self.experts = 4
        self.embed, self.gate = nn.Linear(7, 11 * s), nn.Linear(11 * s, self.experts)
        self.up = nn.Parameter(torch.randn(self.experts, 11 * s, 13 * s) / 4)
        self.down = nn.Parameter(torch.randn(self.experts, 13 * s, 11 * s) / 4)
        self.head = nn.Linear(11 * s, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        inner = torch.relu(torch.bmm(x.expand(self.experts, *x.shape), self.up))
        return self.head(torch.einsum("ne,end->nd", self.gate(x).softmax(-1), torch.bmm(inner, self.down)))


class LossInside(nn.Module):
    """Returns the loss and the logits if labels are given."""

    def __init__(self, s: int, log: bool):
        super().__init__()
        self.net, self.log = nn.Sequential(nn.Linear(7, 11 * s), nn.ReLU(), nn.Linear(11 * s, 5)), log

    def forward(self, x: Tensor, labels: Tensor | None = None):
        logits = self.net(x)
        if labels is None:
            return logits
        if self.log:
            return F.nll_loss(F.log_softmax(logits, -1), labels), logits
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Temporal(nn.Module):
    """Causal dilated convolutions with residuals (WaveNet): tanh times sigmoid, skips summed."""

    def __init__(self, s: int):
        super().__init__()
        self.into, self.out = nn.Conv1d(7, 9 * s, 1), nn.Conv1d(10 * s, 5, 1)
        self.wide = nn.ModuleList(nn.Conv1d(9 * s, 2 * 11 * s, 2, dilation=2**i) for i in range(3))
        self.back = nn.ModuleList(nn.Conv1d(11 * s, 9 * s, 1) for _ in range(3))
        self.skip = nn.ModuleList(nn.Conv1d(11 * s, 10 * s, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.into(x), 0.0
        for i, (wide, back, skip) in enumerate(zip(self.wide, self.back, self.skip)):
            a, b = wide(F.pad(x, (2**i, 0))).chunk(2, dim=1)
            y = torch.tanh(a) * torch.sigmoid(b)
            x, total = x + back(y), total + skip(y)
        return self.out(F.relu(total))


def _tokens() -> Tensor:
    return torch.randint(1, 30, (3, 10))


def _steps() -> Tensor:
    return torch.randn(3, 10, 7)


def _labelled() -> dict[str, Tensor]:
    return {"x": torch.randn(3, 7), "labels": torch.tensor([0, 4, 2])}


MODELS = {
    "lstm": scaled(lambda s: Recurrent(s, nn.LSTM), _tokens),
    "gru": scaled(lambda s: Recurrent(s, nn.GRU), _tokens),
    "lstm_both_ways": scaled(lambda s: Recurrent(s, nn.LSTM, both=True), _tokens),
    "gru_cell": scaled(Cell, _steps),
    "embedding_bag": scaled(Bag, lambda: (torch.randint(30, (12,)), torch.tensor([0, 5, 8]))),
    "mamba_scan": scaled(Scan, _steps),
    "experts_topk": scaled(Mixture, _steps),
    "experts_max": scaled(Switch, _steps),
    "experts_stacked": scaled(StackedExperts, lambda: torch.randn(3, 7)),
    "nll_inside": scaled(lambda s: LossInside(s, log=True), _labelled),
    "cross_entropy_inside": scaled(lambda s: LossInside(s, log=False), _labelled),
    "wavenet": scaled(Temporal, lambda: torch.randn(3, 7, 12)),
}
