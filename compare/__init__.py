"""Offline comparison of two dumps; needs no engine and no torch."""

if __name__ != "probe.compare":
    raise ImportError("import this package as probe.compare (the top-level folder is linked into the probe package)")
