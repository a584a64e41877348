"""Per-token divergence of the two sides' log-probabilities: from dumps, and from files of log-probs.

Everything works on one ``TokenBatch`` (``batch``): the response tokens that both sides have, flat, with both log-probs.

- where it comes from: ``read`` for ``probe tokens``; ``batch_of_dumps`` for ``probe compare``, by ``meaning`` (which of
  a dump's log-probs are compared), ``join`` (by sequence and position) and ``rl`` (advantages and the like in a dump)
- figures: ``section`` puts the report's ``tokens`` together from ``groups``, ``corrections`` and ``entries``, and
  ``update`` its ``ppo``; the formulas are in probe.logprobs and probe.compare.ppo; ``text`` spells token ids
- what log-probs are: ``semantics`` reads it off the numbers, ``declared`` off what the sources declare and off logits;
  ``explained``: how much of a difference two dumps' logits account for
- the report of ``probe tokens``: ``run`` makes it, ``verdict`` judges, ``words`` says it (probe.compare.report.tokens
  renders it); ``worst``: the sequences to dump in full, as a file
"""
