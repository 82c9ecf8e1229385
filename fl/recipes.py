"""Named settings: `python -m fl.run NAME`, any of them overridden by flags.

A recipe is a function without arguments; its docstring gives the command, how long it takes and what to expect.
"""

from fl.config import Config


def digits() -> Config:
    """FedMR on scikit-learn's handwritten digits: 20 clients, Dirichlet 0.5, the defaults.

    python -m fl.run digits
    """
    return Config()


RECIPES = {"digits": digits}
"""From a recipe's name to the function that makes its settings."""
