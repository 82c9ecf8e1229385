"""What a client's model is: which there are, who has which, and the search among them."""

from fl.models.create import create, make_spec

__all__ = ["create", "make_spec"]
