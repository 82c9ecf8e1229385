"""Narrower models: which axes belong together, and how much of each stays."""
