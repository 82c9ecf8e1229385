"""What the commands and the steps of recipes do with checkpoints: each operation once, for both."""
