"""Wrappers of methods and of training: a file each, with settings and `EXTENSION`."""
