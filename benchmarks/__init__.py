"""Programs that measure, and their results."""
