"""Aggregation: weighted, clustered and masked means of models, of one architecture or of several."""

from surgery.averaging.mean import average as average
from surgery.averaging.mean import combine as combine
