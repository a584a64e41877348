"""Capture, in a live process: module hooks, token rows, devices, engines.

``debugger`` is what a script of the user's own drives; it uses ``attach``, which finds out what the model is. ``probe
dump`` starts an engine itself (``runners``). Both make a ``capture``, which relies on:

- ``engines``: what each engine's model, rows and ranks look like; ``rows``: which token each row of a call is, and
  where rows lie in a tensor
- ``tensors``: the tensors in what a module takes and returns; ``taps``: methods whose results pass through no module
- ``repeats``: names of modules that run again on the same rows; ``wrappers``: what stands around a model (DDP, FSDP,
  PEFT, checkpointing, compilation)
- ``device``: copies to the host; ``weights``: sketches of the parameters, taken before the hooks

``demo_model`` and ``demo_corpus`` make the small checkpoint of ``probe demo``.
"""

if __name__ != "probe.hooks":
    raise ImportError("import this package as probe.hooks (the top-level folder is linked into the probe package)")
