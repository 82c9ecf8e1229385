"""Reports on a model before and after surgery: facts, text and picture."""
