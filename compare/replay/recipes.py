"""Every recipe: a tensor that none of them covers is not replayed."""

from __future__ import annotations

from probe.compare.replay import attention, experts, head, linear, norm, residual, rope, router
from probe.compare.replay.base import Recipe

MODULES = (residual, norm, rope, attention, router, experts, linear, head)
"""Each has its own ``RECIPES``; of several that apply to one label the first counts."""

RECIPES: dict[str, tuple[Recipe, ...]] = {}
for _recipe in (recipe for module in MODULES for recipe in module.RECIPES):
    RECIPES[_recipe.output] = (*RECIPES.get(_recipe.output, ()), _recipe)
