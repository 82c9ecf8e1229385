"""Basics of every package: errors, files, tables, random numbers, settings."""
