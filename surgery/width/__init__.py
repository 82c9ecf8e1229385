"""Narrower: which axes belong together, and what stays of them."""
