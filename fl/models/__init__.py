"""The clients' models: which ones exist, which client has which, and the search among them."""

from fl.models.create import check_shape, create, make_spec, takes_text

__all__ = ["check_shape", "create", "make_spec", "takes_text"]
