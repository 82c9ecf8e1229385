"""Named settings: `python -m fl.run NAME`, any of them overridden by flags.

A recipe is a function without arguments; its docstring gives the command, how long it takes and what to expect.
"""

import inspect
from textwrap import indent

from fl.settings.recipes import fedfa, fedmr, femam, first, nested, rivals

_SINGLE = {
    "digits": first.digits,
    "pydoc": first.pydoc,
    "fashion-mnist": first.fashion_mnist,
    "fashion-mnist-rivals": fedmr.fashion_mnist_rivals,
    "femam-digits": femam.digits,
    "femam-fashion-mnist": femam.fashion_mnist,
    "femam-femnist": femam.femnist,
    "fedfa-digits": fedfa.digits,
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
    "vit-cifar10": first.vit_cifar10,
    **rivals.RECIPES,
}
RECIPES = _SINGLE | fedmr.TABLE | femam.TABLE | fedfa.TABLE | fedmr.RELEASED | femam.RELEASED
"""From a recipe's name to the function that makes its settings."""


def overview() -> dict[str, str]:
    """From each recipe to a line about it; the rows of a paper's tables share one.

    >>> overview()["digits"]
    "FedMR on scikit-learn's handwritten digits: 20 clients, Dirichlet 0.5, the defaults."
    """
    lines = {name: make.__doc__.splitlines()[0] for name, make in _SINGLE.items()}
    return lines | fedmr.OVERVIEW | femam.OVERVIEW | fedfa.OVERVIEW


def describe(name: str) -> str:
    """The docstring of a recipe, its commands indented, so that a help keeps them on lines of their own.

    >>> print(describe("fedmr-cifar10-cnn-dir0.5").splitlines()[2])
      python -m fl.run fedmr-cifar10-cnn-dir0.5
    """
    paragraphs = inspect.cleandoc(RECIPES[name].__doc__).split("\n\n")
    return "\n\n".join(indent(text, "  ") if text.startswith("python -m ") else text for text in paragraphs)
