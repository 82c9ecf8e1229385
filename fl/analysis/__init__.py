"""Computations on finished runs: results, costs, clusters of clients, and loss landscapes."""
