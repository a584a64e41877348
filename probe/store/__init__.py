"""Dump format: writing on each rank, reading as a whole, both from the tables in ``schema``.

``writer`` writes one file (``journal``: what survives a kill). ``reader`` opens a dump: ``parts`` reads one file and
``validate`` distrusts it; ``places`` says which rank each file is of; ``sequences`` merges their lists; ``shards``
plans how pieces of several ranks make a tensor, ``peers`` finds the tokens that ranks gave to each other's experts, and
``tensors`` reads by that plan; ``sketches`` joins those of weights.
``dtypes`` and ``checksums`` serve both.
"""
