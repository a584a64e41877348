"""Mixture of experts: which experts each token used on both sides, and what that means for the tensors after.

- ``routing``: the rules by which models choose experts, and figures of one choice against another, in numpy
- ``biased``: what a router's choices say about the bias that it adds to its scores (DeepSeek-V3)
- ``flips``: tokens that two dumps route differently, layer by layer; ``section``: the report's ``moe``
- ``restrict``: tensors behind a flip are judged on the tokens that no flip has reached
- ``experts``: tensors of single experts
"""
