"""``--map FILE``: a user's pairs go before the tables, and a pair that cannot work is refused in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from synthetic_dumps import Scenario, actor, opened, write_dump

from probe.compare.mapping import load_map, read_mapped
from probe.compare.match import match_tensors
from probe.compare.merge import CanonicalReader
from probe.compare.run import compare_dumps
from probe.errors import UsageError

DOWN = "layers.{i}.mlp.down_proj"


@pytest.fixture(scope="module")
def dumps(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("dumps")
    return write_dump(folder / "a", Scenario()), write_dump(folder / "b", actor())


@pytest.fixture
def write(tmp_path):
    def write(content: object, name: str = "map.json") -> Path:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def mapped(dumps, path):
    """Return label -> (natives of a, natives of b, operations) under a mapping file."""
    with opened_pair(dumps) as (a, b):
        sides = read_mapped(a, b, load_map(path))
        found = match_tensors(*sides)
        return {
            m.label: (m.source_a.native, m.source_b.native, (m.source_a.operation, m.source_b.operation))
            for m in found.matched
        }


class opened_pair:
    """Open two dumps for a ``with`` block."""

    def __init__(self, dumps):
        from probe.store.reader import open_dump

        self.dumps = [open_dump(path) for path in dumps]

    def __enter__(self):
        return self.dumps

    def __exit__(self, *exc):
        for dump in self.dumps:
            dump.close()


def test_a_pair_goes_before_the_table(dumps, write):
    path = write({DOWN: "decoder.layers.{i}.pre_mlp_layernorm"})
    label = "layers.1.mlp.down_proj:output.0"
    assert mapped(dumps, path)[label][1] == ("decoder.layers.1.pre_mlp_layernorm:output.0",)
    report = compare_dumps(*dumps, mapping=path)
    assert report["verdict"] == "divergent", "the user's word counts, even where it is wrong"
    assert report["first_divergence"]["name"] == "layers.0.mlp.down_proj"


def test_yaml_says_the_same_as_json(dumps, write):
    yaml = write(f"# corrected by hand\n{DOWN}: decoder.layers.{{i}}.mlp.linear_fc2\n", "map.yaml")
    assert compare_dumps(*dumps, mapping=yaml)["verdict"] == "consistent"


def test_operations_split_and_add_up(dumps, write):
    keys = ", ".join(f"layers.{{i}}.self_attn.{name}_proj" for name in "qkv")
    path = write(
        {
            keys: {
                "a": "model.layers.{i}.self_attn.qkv_proj",
                "b": "decoder.layers.{i}.self_attention.linear_qkv",
                "operation_a": "split_qkv",
                "operation_b": "split_qkv_groups",
            },
            "layers.{i}": {
                "a": ["model.layers.{i}:output.0", "model.layers.{i}:output.1"],
                "b": "decoder.layers.{i}",
            },
        }
    )
    found = mapped(dumps, path)
    assert found["layers.0.self_attn.k_proj:output.0"][2] == ("split_qkv", "split_qkv_groups")
    assert found["layers.2:output.0"][2] == ("sum", "whole")
    assert compare_dumps(*dumps, mapping=path)["verdict"] == "consistent"


def test_names_that_no_table_knows_are_paired_under_as_name(tmp_path, write):
    with opened(tmp_path / "a", Scenario()) as a, opened(tmp_path / "b", actor()) as b:
        for dump, old, new in (
            (a, "model.layers.{}.mlp.down_proj", "model.layers.{}.odd.thing"),
            (b, "decoder.layers.{}.mlp.linear_fc2", "decoder.layers.{}.other.name"),
        ):
            for i in range(3):
                dump.tensors[new.format(i), "output.0"] = dump.tensors[old.format(i), "output.0"]
        path = write({"model.layers.{i}.odd.thing": "decoder.layers.{i}.other.name"})
        matching = match_tensors(*read_mapped(a, b, load_map(path)))
        odd = [match for match in matching.matched if "odd" in match.label]
        assert [match.label for match in odd] == [f"layers.{i}.odd.thing:output.0" for i in range(3)]
        assert all(match.proposal is None for match in odd)
        order = [match.label for match in matching.matched]
        assert order.index("layers.0.odd.thing:output.0") < order.index("layers.1.input_layernorm:output.0")


def test_parameters_have_a_section_of_their_own(dumps, write):
    path = write(
        {
            "tensors": {DOWN: "decoder.layers.{i}.mlp.linear_fc2"},
            "parameters": {"norm.weight": "decoder.final_layernorm.weight"},
        }
    )
    gates = {gate["name"]: gate for gate in compare_dumps(*dumps, mapping=path)["gates"]}
    assert gates["weights"]["status"] == "pass"
    wrong = write({"parameters": {"norm.weight": "decoder.layers.0.input_layernorm.weight"}}, "wrong.json")
    gates = {gate["name"]: gate for gate in compare_dumps(*dumps, mapping=wrong)["gates"]}
    assert gates["weights"]["status"] == "fail" and "norm.weight" in gates["weights"]["detail"]


def test_the_rule_names_the_file(dumps, write):
    path = write({DOWN: "decoder.layers.{i}.mlp.linear_fc2"})
    with opened_pair(dumps) as (a, b):
        side = read_mapped(a, b, load_map(path))[1]
        source = side.resolution.sources["layers.0.mlp.down_proj:output.0"]
        assert source.origin.startswith(str(path))
        assert len(CanonicalReader(side).read(source))


BAD = {
    "not-json": ("{", "is not valid JSON"),
    "a-list": ("[1]", "does not hold an object"),
    "empty": ("{}", "has no entry"),
    "no-name": ({DOWN: None}, "names no tensor of either side"),
    "number": ({DOWN: 3}, "where a name is expected"),
    "option": ({DOWN: {"b": "x.{i}", "opration": "sum"}}, "has the option 'opration'"),
    "operation": ({DOWN: {"b": "x.{i}", "operation": "split_qvk"}}, "did you mean 'split_qkv'"),
    "placeholder": ({DOWN: "decoder.layers.{n}.mlp.linear_fc2"}, "use {i} (layer), {e} (expert), {p} alike"),
    "one-sided": ({DOWN: "decoder.layers.0.mlp.linear_fc2"}, "does not have the same placeholders"),
    "typo-b": ({DOWN: "decoder.layers.{i}.mlp.linear_fc3"}, "decoder.layers.{i}.mlp.linear_fc2:output.0"),
    "typo-a": ({"layers.{i}.mlp.dwn_proj": "decoder.layers.{i}.mlp.linear_fc2"}, "layers.{i}.mlp.down_proj:output.0"),
    "section": ({"tensors": ["x"]}, "is no object of names"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_entry_is_refused_with_file_entry_and_remedy(dumps, write, case):
    content, words = BAD[case]
    path = write(content)
    with pytest.raises(UsageError) as raised:
        compare_dumps(*dumps, mapping=path)
    message = str(raised.value)
    assert str(path) in message and words in message and "\n" not in message
    if isinstance(content, dict) and content and case != "section":
        assert re.search(r"entry '.*_proj'", message)


def test_a_file_that_is_not_there_is_named(dumps, tmp_path):
    with pytest.raises(UsageError, match=r"mapping file .*none\.yaml cannot be read"):
        compare_dumps(*dumps, mapping=tmp_path / "none.yaml")


def test_a_canonical_name_that_a_has_not_is_refused(dumps, write):
    path = write({"layers.{i}.self_attn.q_norm": "decoder.layers.{i}.pre_mlp_layernorm"})
    with pytest.raises(UsageError, match=r"matches nothing in a .*whose table gives none"):
        compare_dumps(*dumps, mapping=path)


def test_a_stated_pair_of_other_widths_is_refused(dumps, write):
    path = write({DOWN: "decoder.layers.{i}.mlp.linear_fc1"})
    with pytest.raises(
        UsageError, match=rf"{re.escape(str(path))} pairs two tensors as layers\.0\.mlp\.down_proj.*hold"
    ):
        compare_dumps(*dumps, mapping=path)
