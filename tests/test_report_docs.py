"""docs/report.md names every key that a report holds, and the forms have words for what keys may say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import test_moe_compare
from synthetic_dumps import Scenario, actor, write_dump

from probe.compare.report.model import LOGPROB_SOURCES
from probe.compare.run import compare_dumps
from probe.compare.tokens.meaning import SOURCES

DOC = (Path(__file__).parents[1] / "docs" / "report.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", DOC))))


def keys(value: Any) -> Iterator[str]:
    """Yield the keys of a report, but not those of ``backends``, which are the engines' own."""
    for key, item in value.items() if isinstance(value, Mapping) else ():
        yield key
        yield from () if key == "backends" else keys(item)
    for item in value if isinstance(value, list) else ():
        yield from keys(item)


def dense(folder: Path) -> dict[str, Any]:
    return compare_dumps(write_dump(folder / "a", Scenario()), write_dump(folder / "b", actor("megatron-te")))


def with_flipped_experts(folder: Path) -> dict[str, Any]:
    a = test_moe_compare.model_tensors()
    b = test_moe_compare.noisy(a)
    test_moe_compare.swap_tie(b)
    test_moe_compare.spread_flips(b)
    return test_moe_compare.compare(folder, a, b)[0]


def test_every_source_of_log_probs_has_words():
    assert set(LOGPROB_SOURCES) == set(SOURCES)


@pytest.mark.parametrize("make", [dense, with_flipped_experts])
def test_every_key_is_documented(make, tmp_path):
    report = make(tmp_path)
    found = set(keys(report))
    assert {"layers", "worst_row", "joined"} <= found
    assert bool(report["moe"]) == (make is with_flipped_experts)
    assert sorted(found - NAMED) == []
