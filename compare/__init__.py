"""Offline comparison of two dumps; needs no engine and no torch.

``run`` makes a report out of two dumps; it uses, in this order:

- ``job``: which stages and steps of a job's folder are the two dumps
- ``side``: a dump read through a table of ``names``, after the user's own (``mapping``: ``--map``); ``logprobs``: those
  that a dump lacks, from its logits
- ``sequences``: which sequences are the same one (``trajectories``: their pieces and their tokens); ``align``: rows
- ``match``: which tensors are the same one (``propose``: guesses where no table knows)
- ``gates`` with ``settings_gates``, ``replicas`` and ``weights``: what must hold before a tensor is worth comparing
- ``measure``: the figures of each pair, read through ``merge`` and judged by ``judge``; ``moe``: the choice of experts,
  and tensors behind a choice that differs; ``copies``: forked copies of this process that measure and replay beside it;
  ``cluster``: Ray tasks that measure elsewhere
- ``floors``: the difference that rounding explains, modelled, measured or against a higher precision
- ``tokens``: log-probs; ``coverage``: which rows and tensors were compared
- ``replay``: each module again in float64 from its own stored inputs; ``locate``: where the sides part, and how
- ``evidence``: all of that in one object; ``diagnose``: its causes and what to do
- ``sections``, ``summary`` and ``gaps`` (what was not compared): the report's entries and sentences, which the forms in
  ``report`` render

``explain`` answers for one tensor how all this treats it.
"""

if __name__ != "probe.compare":
    raise ImportError("import this package as probe.compare (the top-level folder is linked into the probe package)")
