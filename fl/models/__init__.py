"""The clients' models: which ones exist, which client has which, and the search among them."""

from fl.models.create import create, make_spec

__all__ = ["create", "make_spec"]
