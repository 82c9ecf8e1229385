"""The permutation symmetry of networks: reorder widths, align models, repair."""

from surgery.symmetry.alignment import align as align
from surgery.symmetry.permutation import permute as permute
from surgery.symmetry.statistics import repair as repair
