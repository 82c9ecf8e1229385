"""Normalisation layers that federated averaging can handle."""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zoo.errors import ZooError

State: TypeAlias = dict[str, Tensor]
_STATISTICS = ("running_mean", "running_var")
Norm: TypeAlias = Literal["none", "batch", "static_batch", "group", "layer"]


class BatchNorm2d(nn.BatchNorm2d):
    """Batch norm without a step counter.

    torch's `num_batches_tracked` is an integer, which has no mean over clients, and nothing reads it if the momentum is
    fixed. State dicts that have one (torchvision's, timm's) can still be loaded.
    """

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__(num_features, eps)
        self.num_batches_tracked = None  # a buffer that is None: F.batch_norm then uses the fixed momentum

    def reset_running_stats(self) -> None:
        self.running_mean.zero_()
        self.running_var.fill_(1)

    def _check_input_dim(self, input: Tensor) -> None:
        """Nothing: the kernel checks, and torch.fx cannot trace a condition on the shape."""

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        state_dict.pop(prefix + "num_batches_tracked", None)  # from the copy that Module.load_state_dict made
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)


class StaticBatchNorm2d(BatchNorm2d):
    """HeteroFL's static batch norm: training keeps no running statistics.

    See Diao et al., ICLR 2021, section 3.

    Its state is weight and bias alone, so that no statistics of a client's data are sent. In evaluation mode it uses
    the running statistics that were loaded (from `collect_statistics`); without any it uses the batch's, as
    torch does. Loading a state without statistics removes those it has, which belong to another model.
    """

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__(num_features, eps)
        self.track_running_stats = False
        self.running_mean = self.running_var = None

    def reset_running_stats(self) -> None:
        self.running_mean = self.running_var = None

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        if any(prefix + name in state_dict for name in _STATISTICS):  # with one of two torch reports a missing key
            self.running_mean = torch.zeros_like(self.weight, requires_grad=False)
            self.running_var = torch.ones_like(self.weight, requires_grad=False)
        elif prefix + "weight" in state_dict:
            self.running_mean = self.running_var = None
        super()._load_from_state_dict(state_dict, prefix, *args)


@torch.no_grad()
def collect_statistics(model: nn.Module, batches: Iterable[Tensor], state: State | None = None) -> State:
    """Compute running statistics of static batch norms in one pass over the data.

    They are the mean over all batches of the batches' means and unbiased variances (torch calls it a cumulative
    average). During the pass every norm normalises by its batch. HeteroFL does this before it tests a global model.
    Each batch has the same weight, so give batches of equal size.

    Args:
        model: in any mode; it is not changed. Dropout and Scalers are off during the pass.
        batches: inputs [N, C, H, W] of the model.
        state: weights to use instead of the model's own.

    Returns:
        Tensors [C] by state name, to load together with the weights; empty if the model has no static batch norm.

    Raises:
        ZooError: if there are no batches, or if one is so small that a layer gets a single value per channel.

    >>> from zoo import create
    >>> net = create("resnet20", norm="static_batch", width=0.25)
    >>> statistics = collect_statistics(net, [torch.randn(8, 3, 32, 32) for _ in range(2)])
    >>> net.load_state_dict(net.state_dict() | statistics)
    <All keys matched successfully>
    """
    if not any(isinstance(module, StaticBatchNorm2d) for module in model.modules()):
        return {}
    weights = model.state_dict() if state is None else state
    tensors = {name: t.detach() for name, t in weights.items() if not is_statistic(name, model)}
    model = copy.deepcopy(model).eval()  # hooks and modes are the copy's
    norms = {name: m for name, m in model.named_modules() if isinstance(m, StaticBatchNorm2d)}
    moments: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in norms}

    def watch(name: str, _: nn.Module, inputs: tuple[Tensor]) -> None:
        x = inputs[0].float() if inputs[0].dtype in (torch.bfloat16, torch.float16) else inputs[0]
        if x.numel() == x.shape[1]:
            raise ZooError(f"{name} gets one value per channel: give larger batches or images", code="argument")
        moments[name].append(torch.var_mean(x, (0, 2, 3)))

    for name, norm in norms.items():
        norm.reset_running_stats()
        norm.register_forward_pre_hook(partial(watch, name))
    batch = None
    for batch in batches:
        functional_call(model, tensors, (batch,))
    if batch is None:
        raise ZooError("no batches to collect statistics from: give at least one", code="argument")
    result = {}
    for name, pairs in moments.items():
        if pairs:  # the model may not use all of its norms
            variances, means = (torch.stack(column).mean(0).to(norms[name].weight.dtype) for column in zip(*pairs))
            result |= {f"{name}.running_mean": means, f"{name}.running_var": variances}
    return result


def is_statistic(name: str, model: nn.Module) -> bool:
    """Return whether a state name belongs to a statistic of a static batch norm.

    >>> from zoo import create
    >>> is_statistic("stem.norm.running_mean", create("resnet20", norm="static_batch"))
    True
    """
    module, _, tensor = name.rpartition(".")
    return tensor in _STATISTICS and isinstance(model.get_submodule(module), StaticBatchNorm2d)
