"""The clients' models: which exist, which client has which, the search for them."""

from fl.models.create import check_shape, create, make_spec, takes_text

__all__ = ["check_shape", "create", "make_spec", "takes_text"]
