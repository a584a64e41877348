"""Capture, in a live process: module hooks, token rows, devices, engines."""

if __name__ != "probe.hooks":
    raise ImportError("import this package as probe.hooks (the top-level folder is linked into the probe package)")
