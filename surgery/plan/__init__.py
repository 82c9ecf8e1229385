"""Plans, and what one does with them.

A plan (`Plan`) says where each tensor of a small model lies in a full one. By it the small model is extracted,
embedded and built, models of different sizes are averaged by it (`surgery.average`), and it is written down as JSON.
"""

from surgery.plan.fingerprint import fingerprint as fingerprint
from surgery.plan.fingerprint import has_structure as has_structure
from surgery.plan.fingerprint import structure as structure
from surgery.plan.positions import Index as Index
from surgery.plan.positions import Runs as Runs
from surgery.plan.positions import Source as Source
from surgery.plan.positions import as_runs as as_runs
from surgery.plan.submodel import Edit as Edit
from surgery.plan.submodel import Plan as Plan
