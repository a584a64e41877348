"""Canonical names: one table per engine, as data."""
