"""A trained method of levels, `fl.Pathways.load(folder)`, which clients can join."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

import zoo
from fl import models
from fl.algorithms import ALGORITHMS
from fl.base import tensors
from fl.base.errors import FLError
from fl.data.inputs import Inputs, leaves
from fl.federation import client_models
from fl.federation.client_models import Level
from fl.models.custom_model import CustomSpec, Model, identity
from fl.runs import checkpoint
from fl.settings import Config
from fl.settings.extensions import model_change
from surgery import State
from surgery.transfer import double

_FORMAT = "pathways-2"


class Pathways:
    """Levels of models, and the model of each level that a client uses.

    Attributes:
        spec: what all models are.
        kinds: what each level holds: global, a number of cluster models, personal.
        levels: the models of each level, see `fl.federation.client_models.Level`.
        mean: whether logits are averaged over the levels, and not summed.
    """

    def __init__(self, spec: zoo.Spec, kinds: Sequence[str], levels: Sequence[Level], mean: bool) -> None:
        self.spec, self.kinds, self.levels, self.mean = spec, tuple(kinds), list(levels), mean
        self._model = models.create(torch.Generator(), spec).eval()

    @property
    def clients(self) -> int:
        """The number of clients, with those that joined, who come last."""
        return len(self.levels[0].used)

    def pathway(self, client: int) -> list[int]:
        """Return the number of the model that a client uses on each level, -1 for none.

        Raises FLError if there is no such client.
        """
        if not 0 <= client < self.clients:
            raise FLError(f"client {client}: there are clients 0 to {self.clients - 1}; a new one can join")
        return [int(level.used[client]) for level in self.levels]

    @torch.no_grad()
    def predict(self, client: int, x: Inputs) -> Tensor:
        """Return a client's logits of images in [-1, 1] or of tokens.

        They are [N, classes] of images [N, C, H, W], and [N, T, classes] of tokens.
        """
        self.pathway(client)
        logits = client_models.predict(self._call, self.levels, client, x, self.mean)
        if logits is None:
            raise FLError(f"client {client} has no model on any level: it never took part; let it join as a new one")
        return logits

    @torch.no_grad()
    def join(self, x: Inputs, y: Tensor, epsilon: float = 0.0) -> int:
        """Give a new client a pathway, chosen by its labelled samples; return its number.

        Level by level it takes the model that lowers its loss most, if by more than epsilon, or none; of the first
        level always one, as all clients do. Personal models, which belong to their clients, and models that no client
        uses are not offered. FeMAM's paper has no clients that come later; the condition is its Eq. 9.

        Args:
            x: [N, C, H, W] in [-1, 1], or tokens [N, T].
            y: labels [N], of text the next token of each [N, T].
            epsilon: the least gain of a level.
        """
        if self.kinds == ("personal",):
            raise FLError("a new client can be given no model: all models are personal", code="unsupported")
        count = len(leaves(x)[0])
        if not count or count != len(y):
            raise FLError(
                f"{count} samples, {len(y)} labels: a new client is judged by one labelled sample or more", code="data"
            )
        if self.spec.tokens is None and isinstance(x, Tensor) and not x.is_floating_point():
            raise FLError(
                f"the images are {x.dtype}: give floats in [-1, 1], as Dataset.normalise makes them", code="data"
            )
        if y.is_floating_point():
            raise FLError("the labels are floats: a new client is judged by classes, whole numbers", code="data")
        low, high, classes = int(y.min()), int(y.max()), self.spec.num_classes
        if classes and not 0 <= low <= high < classes:
            raise FLError(f"there are labels from {low} to {high}: the models know 0 to {classes - 1}", code="data")
        total, used, best, chosen = torch.zeros(()), 0, 0.0, []
        for at, (kind, level) in enumerate(zip(self.kinds, self.levels)):
            known = [] if kind == "personal" else level.used[level.used >= 0].unique().tolist()
            offers = {k: total + self._call(level.state(k), x) for k in known}
            losses = {
                k: F.cross_entropy(double(out / (used + 1 if self.mean else 1)).flatten(0, -2), y.flatten()).item()
                for k, out in offers.items()
            }
            k = min(losses, key=losses.get, default=-1)
            if k >= 0 and (at == 0 or best - losses[k] > epsilon):
                total, used, best = offers[k], used + 1, losses[k]
            else:
                k = -1
            chosen.append(k)
        self.levels = [
            level._replace(used=torch.cat([level.used, torch.tensor([k])])) for level, k in zip(self.levels, chosen)
        ]
        return self.clients - 1

    def save(self, path: str | Path) -> None:
        """Write everything into one safetensors file, atomically; `load` is the inverse."""
        path = Path(path)
        parts = checkpoint.flatten({f"{at}": {**level.models, "": level.used} for at, level in enumerate(self.levels)})
        state = {"spec": dataclasses.asdict(self.spec), "kinds": self.kinds, "mean": self.mean}
        state["custom"] = identity(self.spec) if isinstance(self.spec, CustomSpec) else None
        tensors.write(path, _FORMAT, parts, state)

    @classmethod
    def load(cls, path: str | Path, model: Model | None = None) -> "Pathways":
        """Load pathways, on the CPU, from a run folder or a file that `save` wrote.

        Args:
            model: the model of your own that the run was given, if it was, as for `fl.load_model`.

        Raises FLError for the folder of another method, for another model, and for what cannot be read.
        """
        path = Path(path)
        if not path.is_dir():
            flat, state = tensors.read(path, _FORMAT)
            parts = checkpoint.unflatten(flat)
            levels = [Level(stored := parts[str(at)], stored.pop("")) for at in range(len(parts))]
            spec = checkpoint.spec_of(path, state["spec"], state["custom"], model)
            return cls(spec, state["kinds"], levels, state["mean"])
        config = Config.read(path)
        name, known = config.method.name, {n: method for n, method in ALGORITHMS.items() if method.pathways}
        if name not in known:
            raise FLError(
                f"{path} is a run of {name}, whose clients have no pathways: there are {', '.join(known)}",
                code="unsupported",
            )
        if change := model_change(config.extensions):
            raise FLError(
                f"{path}: with --{change[0]} levels are no whole models: use fl.load_model", code="unsupported"
            )
        if config.model.norm == "static_batch" or config.model.name == "transformer_masked":
            raise FLError(
                f"{path}: for a model with static batch norms, or of masked text, use fl.load_model", code="unsupported"
            )
        spec, server = checkpoint.read_parts(path, model=model)
        kinds, used = known[name].pathways(config.method.options, server)
        return cls(spec, kinds, used.levels, used.mean)

    def _call(self, state: State, x: Inputs) -> Tensor:
        return functional_call(self._model, state, (x,))
