"""YAML is read as data, by the rules of 1.2, with places, and no text keeps the reader busy."""

import math
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpt.config.text.yaml_text import MAX_BYTES, read_file, read_text, resolve_scalar, write_text
from mpt.errors import ConfigError

pytestmark = pytest.mark.tier("fast")


def read(text):
    node, problems = read_text(text, "file")
    assert not problems, [str(problem) for problem in problems]
    return node.plain()


def complaints(text):
    return [str(problem) for problem in read_text(text, "file")[1]]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3E4", 3e4),
        ("-.5", -0.5),
        ("5.", 5.0),
        ("1.0e+16", 1e16),
        ("12", 12),
        ("-12", -12),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("Off", "Off"),
        ("y", "y"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("1e", "1e"),
        ("=", "="),
    ],
)
def test_a_scalar_means_what_yaml_1_2_says(text, value):
    found = read(f"key: {text}")["key"]
    assert found == value
    assert type(found) is type(value)


def test_quotes_make_text_of_everything():
    assert read("[\"1e-4\", 'true', '', \"~\"]") == ["1e-4", "true", "", "~"]


def test_keys_are_text():
    assert read("1: a\ntrue: b\nno: c") == {"1": "a", "true": "b", "no": "c"}


def test_not_a_number_and_infinity_are_read_and_left_to_the_schema():
    assert math.isnan(resolve_scalar(".nan"))
    assert resolve_scalar("-.inf") == -math.inf


def test_places_are_those_of_keys_and_values():
    node, _ = read_text("a: 1\nb:\n  - x\n  - c: 2\n", "f.yaml")
    assert (str(node.value["a"].key_place), str(node.value["a"].place)) == (
        "f.yaml:1:1",
        "f.yaml:1:4",
    )
    assert str(node.value["b"].value[1].value["c"].place) == "f.yaml:4:8"


MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
ALIAS_BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (MERGE_BOMB, 1, "anchor &a0"),
        (ALIAS_BOMB, 1, "anchor &a"),
        ("&me [*me]", 1, "anchor &me"),
        ("a: 1\n<<: {b: 2}", 2, "merge key <<"),
        ("a: 1\nb: *a", 2, "alias *a"),
        (
            "a: !!python/object/apply:os.system ['touch canary']",
            1,
            "tag !!python/object/apply:os.system",
        ),
        ("a: !!python/name:os.system", 1, "tag !!python/name:os.system"),
        ("a: !<tag:yaml.org,2002:python/module:os> x", 1, "tag !!python/module:os"),
        ("a: !!str 5", 1, "tag !!str"),
        ("!!python/tuple [1]", 1, "tag !!python/tuple"),
        ("!!str a: 1", 1, "tag !!str"),
        ("%TAG ! tag:yaml.org,2002:python/\n---\na: !name:os.system x", 3, "is not allowed"),
        ("a: 1\n---\nb: 2", 2, "second document"),
        ("? [a, b]\n: 1", 1, "cannot be a key"),
        ("a: 1\nb: 2\na: 3", 3, "is repeated here; it was first given at file:1:1"),
        ("a: 99999999999999999999", 1, "does not fit in 64 bits"),
        ("a: " + "9" * 50_000, 1, "does not fit in 64 bits"),
        ("a: 0x" + "f" * 50_000, 1, "does not fit in 64 bits"),
        ("[" * 60_000, 1, "nested more than 40"),
        ("{a: " * 10_000, 1, "nested more than 40"),
        ("- " * 30_000, 1, "nested more than 40"),
        ("? " * 30_000, 1, "cannot be a key"),
        ("a: [1,\nb: }", 2, "not YAML"),
        ("a: 'x", 1, "not YAML"),
        ("a:\n\t- c", 2, "not YAML"),
        ('a: "\\ud800"', 1, "surrogate"),
        ('a: "\\U00110000"', 1, "not YAML"),
        ("a: \x00", 1, "not YAML"),
        ("a: @x", 1, "not YAML"),
        ("[" + "1," * 30_000 + "1]", 1, "more than 5000 values"),
        ("x" * (MAX_BYTES + 1), 1, "longer than 64 KiB"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else str(value),
)
def test_what_is_more_than_data_is_refused_in_a_second_naming_the_line(text, line, words):
    started = time.process_time()
    found = complaints(text)
    assert time.process_time() - started < 5.0  # what hangs takes minutes
    assert len(found) == 1
    assert found[0].startswith(f"file:{line}:")
    assert words in found[0]
    assert found[0].isprintable()


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "b" * 60_000,
        "#" * 65_000,
        "\n" * 65_000,
        "a: |\n" + "  x\n" * 15_000,
        ",",
        "a: b: c",
    ],
)
def test_long_and_odd_texts_are_answered_in_a_second(text):
    started = time.process_time()
    read_text(text, "file")
    assert time.process_time() - started < 5.0  # what hangs takes minutes


@pytest.mark.tier("full")
@given(st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_any_text_gives_a_tree_or_a_problem_and_never_another_exception(text):
    node, problems = read_text(text, "file")
    assert problems or node.plain() == read_text(text, "file")[0].plain()


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.tier("full")
@given(PLAIN)
@settings(max_examples=200, deadline=None)
def test_what_is_written_reads_back_with_its_types(value):
    assert repr(read(write_text(value))) == repr(value)


@pytest.mark.parametrize(
    "text",
    ["1e-4", "yes", "null", "0x1f", "12", ".nan", "<<", "*a", "&a", "!x", "a: b", "# no", ""],
)
def test_text_that_looks_like_something_else_is_quoted_when_written(text):
    assert read(write_text({"key": text, text or "k": 1}))["key"] == text


def test_a_file_that_cannot_be_a_configuration_is_named(tmp_path):
    latin, large = tmp_path / "latin.yaml", tmp_path / "large.yaml"
    latin.write_bytes(b"a: \xff")
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    for path, words in [
        (latin, "not UTF-8"),
        (large, "larger than"),
        (tmp_path, "a folder"),
        (tmp_path / "no", "no such"),
    ]:
        with pytest.raises(ConfigError, match=words) as caught:
            read_file(path)
        assert str(path) in str(caught.value)


def test_a_byte_order_mark_is_not_part_of_the_first_key(tmp_path):
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert read_file(path)[0].plain() == {"a": 1, "b": 2}


def test_what_is_no_file_is_told_and_the_nearest_file_is_named(tmp_path):
    (tmp_path / "dcgan.yaml").write_text("model: dcgan")
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(
        ConfigError, match=r"dcgna\.yaml: no such file; .*; did you mean .*dcgan\.yaml\?$"
    ):
        read_file(tmp_path / "dcgna.yaml")
    (tmp_path / "vae.yaml").write_text("model: vae")  # a name that mpt has too
    with pytest.raises(
        ConfigError, match=r"vae\.yml: no such file; .*; did you mean .*/vae\.yaml\?$"
    ):
        read_file(tmp_path / "vae.yml")
    with pytest.raises(ConfigError, match=r"other\.yaml: no such file; a YAML file is expected$"):
        read_file(tmp_path / "other.yaml")
    with pytest.raises(
        ConfigError, match=r"train\.epochs=2: a setting, where .*, or @NAME train\.epochs=2$"
    ):
        read_file(Path("train.epochs=2"))
    with pytest.raises(
        ConfigError, match=r"pipe\.yaml: neither a file nor a link to one; a YAML file is expected$"
    ):
        read_file(tmp_path / "pipe.yaml")
    (tmp_path / "train.py").write_text("import torch")
    with pytest.raises(
        ConfigError,
        match=r"train\.py: a Python program, .*; `mpt plan \S*/train\.py` plans a training script$",
    ):
        read_file(tmp_path / "train.py")
    with pytest.raises(
        ConfigError,
        match=r"train\.py:build: a Python program, .*; `mpt plan \S*/train\.py:build` plans a training script$",
    ):
        read_file(tmp_path / "train.py:build")
    with pytest.raises(ConfigError, match=r"a folder; a YAML file is expected$"):
        read_file(tmp_path)


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a:\n  b: 1\n   c: 2\n", "3:5", "indent the line as those around it"),
        ("a:\n  b:1\n  c: 2\n", "3:4", "write a space behind each ':'"),
        ("a: x: y\n", "1:5", "put quotes around a value that holds one"),
        ("a:\n    b: 1\n  c: 2\n", "3:3", "indented otherwise than those around it"),
        ("a: 1\nb=2\nc: 3\n", "2:1", "no ': ' in this line"),
        ("a: {b: 1\n", "2:1", "a comma is missing here, or the bracket of line 1 is not closed"),
        ("a: {b: 1 c: 2}\n", "1:11", "a comma is missing here"),
        ("a: 'x\nb: 1\n", "1:4", "a quote that is opened here and never closed"),
        ("a: *.jpg\n", "1:5", "put quotes around a value that begins with *"),
        ("a: `x`\n", "1:4", "put quotes around a value that begins with this character"),
        ('a: "C:\\data"\n', "1:8", "a backslash between double quotes: use single quotes"),
        ("a: 1\nb: x\0y\n", "2:5", "a control character (0x00); remove it"),
    ],
)
def test_a_mistake_in_the_syntax_is_said_in_the_words_of_a_writer(text, place, words):
    (found,) = complaints(text)
    assert found.startswith(f"file:{place}: ")
    assert words in found
    assert "\n" not in found
