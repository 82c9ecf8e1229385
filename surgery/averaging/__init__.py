"""Aggregation: weighted, clustered and masked means of models, of one architecture or of several."""

from surgery.averaging.average import average as average
from surgery.averaging.average import combine as combine
