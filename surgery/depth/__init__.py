"""Deeper and shallower: sections, grafting and its inverse."""
