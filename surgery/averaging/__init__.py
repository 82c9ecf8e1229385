"""Aggregation: weighted, clustered and masked means of models of any architecture."""

from surgery.averaging.mean import average as average
from surgery.averaging.mean import combine as combine
