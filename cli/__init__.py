"""Command line: one file per command; the only place that knows click and rich."""

if __name__ != "probe.cli":
    raise ImportError("import this package as probe.cli (the top-level folder is linked into the probe package)")
