"""Locate a divergence: where it starts, what each module adds, which tokens and channels carry it."""
