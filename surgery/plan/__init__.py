"""Plans: where each tensor of a small model lies in a full one.

A `Plan` extracts, embeds and builds the small model, is saved as JSON, and serves to average models of different sizes
(`surgery.average`).
"""

from surgery.plan.fingerprint import fingerprint as fingerprint
from surgery.plan.fingerprint import has_structure as has_structure
from surgery.plan.fingerprint import structure as structure
from surgery.plan.positions import Index as Index
from surgery.plan.positions import Ranges as Ranges
from surgery.plan.positions import Source as Source
from surgery.plan.positions import as_runs as as_runs
from surgery.plan.submodel import Edit as Edit
from surgery.plan.submodel import Plan as Plan
