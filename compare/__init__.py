"""Offline comparison of two dumps; needs no engine and no torch.

``run`` makes a report out of two dumps; it uses, in this order:

- ``side``: a dump read through a table of ``names``, after the user's own (``mapping``: ``--map``); ``logprobs``: those
  that a dump lacks, from its logits
- ``sequences``: which sequences are the same one (``trajectories``: their pieces and their tokens); ``align``: rows
- ``match``: which tensors are the same one (``propose``: guesses where no table knows)
- ``gates`` with ``settings_gates``, ``replicas`` and ``weights``: what must hold before a tensor is worth comparing
- ``measure``: the figures of each pair, read through ``merge`` and judged by ``judge``; ``moe``: the choice of experts,
  and tensors behind a choice that differs
- ``tokens``: log-probs; ``coverage``: what was not compared; ``locate``: the first divergence
- ``sections`` and ``summary``: the entries and the sentences of the report, which the forms in ``report`` render

``explain`` answers for one tensor how all this treats it.
"""

if __name__ != "probe.compare":
    raise ImportError("import this package as probe.compare (the top-level folder is linked into the probe package)")
