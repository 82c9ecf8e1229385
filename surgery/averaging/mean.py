"""The one mean of models: `average`, and what else may take the place of the mean."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from surgery.averaging.common import Reduce, Weights
from surgery.averaging.plans import average_parts
from surgery.averaging.stacks import average_stack
from surgery.errors import SurgeryError
from surgery.plan import Plan
from surgery.states import Models, Stack, State


def average(
    models: Models,
    plans: Sequence[Plan] | None = None,
    weights: Weights = None,
    fallback: Mapping[str, Tensor] | nn.Module | None = None,
    *,
    mask: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
    factors: Mapping[str, Tensor | Sequence[float]] | None = None,
) -> State | Stack:
    """Take the weighted mean of K models, element by element.

    With `plans` the models may have different sizes: the mean is a full model, and each element is averaged over the
    models that cover it. It is what embedding every model by its plan and averaging with the masks gives, but in
    time linear in the number of elements of the models, and without more memory than the result's. This is the
    aggregation of HeteroFL, NeFL and FedFA (Alg. 1, lines 16-22): a tensor with several sources, as in a grafted block,
    counts at each of them, and of positions that repeat (in a wider model) the first does. On the CPU several tensors
    are averaged at once, in as many threads as torch may use.

    Args:
        models: a stack, tensors [K, *S], or a list of K states or modules.
        plans: where each model lies, all in one full model; needs `fallback`. None: all models have one architecture.
        weights: non-negative, not all zero; they need not sum to one. None gives all models the same weight. Weights
            [K] give a state; weights [C, K], which plans do not take, give a stack of C means (clustering: row c has
            the weights of the members of cluster c). A model of weight 0 is ignored, even if it holds NaN; NaN of any
            other model passes through to the mean (`surgery.merging` refuses it). Give weights on the CPU: they are
            read on the host, which would have to wait for an accelerator.
        fallback: a state (or a stack of C states) with the values for elements that no model with weight covers; with
            plans a state of the full model.
        mask: boolean tensors [K, *S] (or a shape that broadcasts to it), True where model k covers the element. The
            mean of an element is taken over the models that cover it. Tensors without a mask are covered entirely.
            Needs `fallback`. A list of K masks, as `embed` gives them, is stacked. Plans take its place.
        factors: only with plans: [K] by name of the full model's tensors, as `surgery.scale.norm_factors` gives them.
            Model k's values of a tensor are multiplied by factor k, as in the models that `match_norms` scales, but
            without copying any; the weights that their sum is divided by are not. Names left out have factor 1; integer
            tensors ignore theirs. Give factors on the CPU.

    Returns:
        Tensors [*S], or [C, *S] for two-dimensional weights, of the models' dtype, with plans of the fallback's dtypes
        and devices; half precision is accumulated in float32. Integer and boolean tensors are never averaged: the
        result is the maximum over the models with weight. Neither are masks of torch.nn.utils.prune (`weight_mask`
        beside `weight_orig`), which have to be the same.

    Raises:
        SurgeryError: for weights that are negative or of a wrong shape; for weights that sum to zero, a mask or plans
            without a fallback; for masks, fallbacks, plans and factors that do not fit; for models that were pruned
            differently.

    >>> import torch
    >>> average({"w": torch.tensor([[0.0], [4.0]])}, weights=[3, 1])
    {'w': tensor([1.])}
    >>> average({"w": torch.tensor([[0.0], [4.0]])}, weights=[[1, 1], [0, 2]])["w"].tolist()
    [[2.0], [4.0]]
    >>> from surgery.plan import Source
    >>> narrow = Plan({"w": (Source("w", (((0, 1),),)),)}, {"w": (3,)})
    >>> wide = Plan({"w": (Source("w", (((0, 2),),)),)}, {"w": (3,)})
    >>> models = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0, 4.0])}]
    >>> average(models, [narrow, wide], fallback={"w": torch.tensor([7.0, 8.0, 9.0])})
    {'w': tensor([2., 4., 9.])}
    """
    return combine(models, plans, weights, fallback, mask=mask, factors=factors)


def combine(
    models: Models,
    plans: Sequence[Plan] | None = None,
    weights: Weights = None,
    fallback: Mapping[str, Tensor] | nn.Module | None = None,
    *,
    mask: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
    factors: Mapping[str, Tensor | Sequence[float]] | None = None,
    reduce: Reduce | None = None,
) -> State | Stack:
    """Do what `average` does, with `reduce` in the place of the weighted mean.

    Args:
        reduce: takes the values of each tensor of numbers in the models that have weight; integers and masks of pruning
            are dealt with here. With plans it has one embedded tensor of all models at a time. None: the mean.
    """
    if plans is None:
        if factors is not None:
            raise SurgeryError("factors go with plans: give plans, or scale by match_norms first", code="argument")
        return average_stack(models, weights, fallback, mask, reduce)
    if mask is not None:
        raise SurgeryError("plans say which elements each model covers: give either plans or a mask", code="argument")
    return average_parts(models, plans, weights, fallback, factors, reduce)
