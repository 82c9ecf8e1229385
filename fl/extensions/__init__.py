"""Wrappers of methods and of local training: one file each, with its settings and an `EXTENSION`."""
