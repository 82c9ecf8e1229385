"""The columns of metrics.csv. A file of this folder with a `COLUMN` adds one, which has the file's name."""

from fl.runs.columns.moment import Moment
from fl.runs.columns.registry import columns, measure_columns

__all__ = ["Moment", "columns", "measure_columns"]
