"""Basics of every room: errors, files, tables, random numbers, types of flags, declarations of packages."""
