"""Computations on finished runs: results, costs, clusters, loss landscapes."""
