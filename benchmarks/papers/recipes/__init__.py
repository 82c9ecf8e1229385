"""The papers' settings as recipes: `python -m benchmarks.papers NAME`, with the flags of `python -m fl.run`.

Read fedmr.py, femam.py and fedfa.py (the papers' tables, and their methods on small data), nested.py and rivals.py
(methods that others compare with). Cells hold the same settings method by method, store what their runs measure, and
judge it.
"""

from benchmarks.papers.recipes import fedfa, fedmr, femam, nested, rivals
from fl.settings.recipes import Recipe

_SINGLE: dict[str, Recipe] = {
    "fashion-mnist-rivals": fedmr.fashion_mnist_rivals,
    "vit-cifar10": fedmr.vit_cifar10,
    "femam-fashion-mnist": femam.fashion_mnist,
    "femam-femnist": femam.femnist,
    "fedfa-fashion-mnist": fedfa.fashion_mnist,
    "fedfa-cifar10": fedfa.cifar10,
    "fedfa-text": fedfa.text,
    "heterofl-cifar10": fedfa.heterofl_cifar10,
    "nefl-cifar10": fedfa.nefl_cifar10,
    "heterofl-cifar10-a-e": nested.heterofl_a_e,
    "fjord-cifar10": nested.fjord_cifar10,
    "depthfl-cifar100": nested.depthfl_cifar100,
    "inclusivefl-pydoc": nested.inclusivefl_pydoc,
    "scalefl-cifar10": nested.scalefl_cifar10,
    **rivals.RECIPES,
}
RECIPES = _SINGLE | fedmr.TABLE | femam.TABLE | fedfa.TABLE | fedmr.RELEASED | femam.RELEASED
"""From a recipe's name to the function that makes its settings."""
