"""Widening: a larger model that computes the same."""

from surgery.widening.growth import widen as widen
