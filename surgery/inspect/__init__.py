"""What there is to tell about a model before and after: facts, text, picture."""
