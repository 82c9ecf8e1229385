"""Run folders: what is in one, how it comes there and how it is read."""
