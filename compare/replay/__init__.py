"""Recompute a dump's modules in float64 from their own stored inputs, so that faults part from rounding."""
