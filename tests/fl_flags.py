"""Flags of a run that takes well under a second."""

TINY = ["--clients", "4", "--participants", "2", "--rounds", "4", "--local-epochs", "1", "--width", "0.1"]
TINY += ["--batch-size", "50", "--local-valid", "0.1"]
