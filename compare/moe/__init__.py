"""Mixture of experts: which experts each token used on both sides, and what that means for the tensors after.

- ``routing``: the rules by which models choose experts, and figures of one choice against another, in numpy
- ``flips``: tokens that two dumps route differently, layer by layer, and the report's ``moe`` section
- ``restrict``: tensors behind a flip are judged on the tokens that no flip has reached
- ``experts``: tensors of single experts
"""
