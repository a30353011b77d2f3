"""Recipes as YAML: numbers and words as they are meant, lines of keys, and errors in one paragraph with the line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wpr.config.yaml_file import YamlFile, parse_value, read_yaml, to_yaml
from wpr.errors import RecipeError


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        read_yaml(write(folder, text), "mine")
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5), ("1E5", 1e5), ("+1e3", 1e3), ("-2.5e-3", -2.5e-3), ("1.", 1.0), (".5", 0.5),
        ("-.inf", float("-inf")),
        ("7", 7), ("-7", -7), ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("no", "no"), ("yes", "yes"), ("on", "on"), ("off", "off"), ("y", "y"), ("2020-01-01", "2020-01-01"),
        ("'1e-5'", "1e-5"), ("e5", "e5"), ("1e", "1e"), ("google/gemma-2b", "google/gemma-2b"),
        ("[0.1, no]", [0.1, "no"]), ("{r: 16}", {"r": 16}),
    ],
)  # fmt: skip
def test_values_mean_what_they_say(text: str, value: Any, tmp_path: Path) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)
    assert read_yaml(write(tmp_path, f"key: {text}\n")).values == {"key": value}


def test_nan_is_a_number() -> None:
    found = parse_value(".nan")
    assert isinstance(found, float)
    assert found != found


@pytest.mark.parametrize(
    ("text", "value"),
    [("010", 10), ("1:30", "1:30"), ("TRUE", True), ("0o17", 15), ("0x1f", 31), ("1_000", "1_000"), ("1_0.5", "1_0.5")],
)
def test_values_of_yaml_1_2(text: str, value: Any) -> None:
    assert parse_value(text) == value


def test_a_value_of_the_command_line_that_is_no_yaml_is_text() -> None:
    assert parse_value("[a, b") == "[a, b"
    assert parse_value("*.jsonl") == "*.jsonl"


def test_every_key_has_its_line(tmp_path: Path) -> None:
    file = read_yaml(
        write(tmp_path, "# first\nname: a\nppo:\n  beta: 1\n  list:\n    - x\nsft: {batch_size: 2}\n"), "mine"
    )
    keys = {"name": 2, "ppo": 3, "ppo.beta": 4, "ppo.list": 5, "ppo.list.0": 6, "sft": 7, "sft.batch_size": 7}
    assert file.lines == keys
    assert file.where("ppo.beta") == "mine, line 4"


def test_an_unknown_key_is_where_its_section_is() -> None:
    file = YamlFile("mine", {}, {"ppo": 3})
    assert file.where("ppo.beta.deep") == "mine, line 3"
    assert file.where("sft.beta") == "mine"


def test_a_key_twice_names_both_lines(tmp_path: Path) -> None:
    message = refusal(tmp_path, "a: 1\nb:\n  c: 2\n  d: 3\n  c: 4\n")
    assert message == "mine, line 5: b.c stands here for the second time (first in line 3); remove one of them"
    assert "line 2" in refusal(tmp_path, "a: 1\na: 1\n")


def test_the_same_key_in_two_sections_is_fine(tmp_path: Path) -> None:
    assert read_yaml(write(tmp_path, "a: {c: 1}\nb: {c: 2}\n")).values == {"a": {"c": 1}, "b": {"c": 2}}


def test_a_key_twice_within_a_list(tmp_path: Path) -> None:
    assert "line 3" in refusal(tmp_path, "a:\n  - b: 1\n    b: 2\n")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\n\tb: 2\n", 2),
        ("a:\n  b: 1\n\tc: 2\n", 3),
        ("a: 1\nb: [1, 2\nc: 3\n", 3),
        ("a: {b: 1\n", 2),
        ("a: 'open\n", 2),
        ("a: 1\nb: c: d\n", 2),
        ("a: 1\n---\nb: 1\n", 2),
        ("a: !!python/object:os.system {}\n", 1),
        ("a: *nowhere\n", 1),
    ],
)
def test_broken_yaml_is_told_with_its_line(text: str, line: int, tmp_path: Path) -> None:
    message = refusal(tmp_path, text)
    assert message.startswith(f"mine, line {line}, column ")
    assert "fix the line" in message


def test_control_characters_are_told_in_one_paragraph(tmp_path: Path) -> None:
    message = refusal(tmp_path, "a: 1\nb: \x01\n")
    assert message == "mine, line 2 has a character that YAML does not allow (number 1); remove it"


def test_an_empty_file(tmp_path: Path) -> None:
    for text in ("", "# only words\n"):
        assert refusal(tmp_path, text).startswith("mine is empty; write `key: value` lines")


@pytest.mark.parametrize(("text", "kind"), [("- a\n- b\n", "list"), ("just words\n", "str")])
def test_a_file_without_settings(text: str, kind: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, text) == f"mine holds {kind}, not settings; write `key: value` lines"


def test_a_file_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("name: é\n".encode("latin-1"))
    with pytest.raises(RecipeError, match=r"latin\.yaml is not UTF-8 text \(byte 6\); save it as UTF-8"):
        read_yaml(path)
    with pytest.raises(RecipeError, match="cannot be read: No such file"):
        read_yaml(tmp_path / "gone.yaml")
    with pytest.raises(RecipeError, match="cannot be read: Is a directory"):
        read_yaml(tmp_path)


def test_an_endless_file_is_refused(tmp_path: Path) -> None:
    assert "line" in refusal(tmp_path, "a: &a {b: *a}\n")


def unfolding(times: int, levels: int, form: str = "[{}]") -> str:
    """Aliases of aliases: every line stands for ``times`` of the one before."""
    lines = [f"a{level}: &a{level} " + form.format(", ".join([f"*a{level - 1}"] * times)) for level in range(1, levels)]
    return "a0: &a0 {k: 1}\n" + "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "line", "limit"),
    [
        (unfolding(10, 12), 6, "100000 values"),
        (unfolding(10, 12, "{{<<: [{}]}}"), 6, "100000 values"),
        (unfolding(1, 5000), 50, "50 levels"),
    ],
)
def test_aliases_that_unfold_without_measure_are_refused(text: str, line: int, limit: str, tmp_path: Path) -> None:
    """A few hundred bytes that would fill the memory."""
    message = refusal(tmp_path, text)
    assert re.fullmatch(
        rf"mine, line {line}: a\d+ has more than {limit} once its aliases .*; write out what.*", message
    )
    with pytest.raises(RecipeError, match=f"command line, line .* more than {limit}"):
        parse_value(text)


def test_aliases_within_measure_are_fine(tmp_path: Path) -> None:
    values = read_yaml(write(tmp_path, "a: &a {k: 1}\nb: {<<: *a, c: 2}\nd: [*a, *a]\n")).values
    assert values == {"a": {"k": 1}, "b": {"k": 1, "c": 2}, "d": [{"k": 1}, {"k": 1}]}


@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ("{k: ", "}")])
def test_deep_nesting_is_told_with_its_line(opened: str, closed: str, tmp_path: Path) -> None:
    for depth in (60, 5000):
        message = refusal(tmp_path, f"a: 1\nb: {opened * depth}1{closed * depth}\n")
        assert message.startswith("mine, line 2, column ")
        assert "is not valid YAML: it is nested deeper than 50 levels" in message
    assert parse_value(opened * 5000 + closed * 5000) == opened * 5000 + closed * 5000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9" * 5000, "cannot be read as int"),
        ("!!int abc", "'abc' cannot be read as int"),
        ("!!int ''", "'' cannot be read as int"),
        ("!!float abc", "'abc' cannot be read as float"),
        ("!!bool maybe", "'maybe' cannot be read as bool"),
        ("!!timestamp soon", "'soon' cannot be read as timestamp"),
    ],
)
def test_text_that_does_not_fit_its_tag(text: str, message: str, tmp_path: Path) -> None:
    found = refusal(tmp_path, f"a: 1\nb: {text}\n")
    assert found.startswith("mine, line 2, column 4 is not valid YAML")
    assert message in found


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert read_yaml(write(tmp_path, "\ufeffname: a\nseed: 1\n")).values == {"name": "a", "seed": 1}


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
few = settings(max_examples=40)  # a file each
NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)


def nested(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(
        NAMES, st.recursive(values, lambda part: st.lists(part, max_size=3) | st.dictionaries(NAMES, part, max_size=3))
    )


def read_back(values: Any, folder: Path) -> Any:
    return read_yaml(write(folder, to_yaml(values))).values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("yaml")


@few
@given(values=nested(PLAIN))
def test_numbers_survive_writing(values: Any, folder: Path) -> None:
    assert read_back(values, folder) == values


@few
@example(values={"learning_rate": 1e-5, "large": 1e22})
@example(values={"off": 0.0, "y": 1.0, "1e5": 2.0})
@given(values=nested(st.floats(allow_nan=False)))
def test_other_readers_see_the_same_numbers(values: Any) -> None:
    assert yaml.safe_load(to_yaml(values)) == values


WORDS = ["no", "true", "True", "null", "~", "", "010", "1_000", "1:30", "0x1f", "2020-01-01", ".inf", ".nan"]
NUMBERS = ["1e-5", "1E5"]
"""Text to readers of YAML 1.1, numbers to us."""


@pytest.mark.parametrize("word", WORDS)
def test_text_that_looks_like_something_else_survives_writing(word: str, tmp_path: Path) -> None:
    assert read_back({"key": word}, tmp_path) == {"key": word}


@pytest.mark.parametrize("word", NUMBERS)
def test_text_that_looks_like_our_numbers_survives_writing(word: str, tmp_path: Path) -> None:
    assert read_back({"key": word}, tmp_path) == {"key": word}


@few
@given(values=nested(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn"]), max_size=12)))
def test_text_survives_writing(values: Any, folder: Path) -> None:
    assert read_back(values, folder) == values


def test_numbers_are_written_as_people_write_them() -> None:
    assert to_yaml({"rate": 1e-5, "share": 0.5, "all": float("inf")}) == "rate: 1.0e-05\nshare: 0.5\nall: .inf\n"


def test_settings_keep_their_order(tmp_path: Path) -> None:
    assert list(read_back({"b": 1, "a": 2, "c": 3}, tmp_path)) == ["b", "a", "c"]
