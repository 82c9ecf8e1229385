"""Everything that draws: the only room that imports matplotlib."""
