"""Everything that draws: the only package that imports matplotlib."""
