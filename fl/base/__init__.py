"""Basics of every package: errors, files, tables, random numbers, types of flags, declarations of packages."""
