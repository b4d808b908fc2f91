"""The parser against hjson as an oracle, and its places against documents whose places are known by construction."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import hjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_config.errors import ConfigError
from ds_config.parse import KeyPath, dotted, parse

NAMES = st.one_of(
    st.sampled_from(["stage", "lr", "train_batch_size", "a-b", "x.y", "with space", "", "#", "//", "{", "é", "'", '"']),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(
        ["cpu", "a # no comment", "// x", "/* x */", "}", "],", "''", "true", "1e5", "two\nlines", "'''", "\\", "x, y"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=20,
)
DOCUMENTS = st.dictionaries(NAMES, VALUES, max_size=5)


class Render:
    """Writes a value as HJSON with random layout and comments, and notes the line of every key and element."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.text, self.lines = rng, "", {}

    def line(self) -> int:
        return self.text.count("\n") + 1

    def space(self) -> None:
        for _ in range(self.rng.choice([0, 0, 1, 1, 2, 3])):
            self.text += self.rng.choice(
                [
                    " ",
                    "\t",
                    "\n",
                    "\r\n",
                    "\n\n",
                    " # c: {1]\n",
                    '// "x": 1,\n',
                    "/* a\n b: [ */",
                    "/**/",
                    "# '\n",
                    "/* // # */ ",
                ]
            )

    def quoted(self, text: str) -> str:
        body = json.dumps(text, ensure_ascii=self.rng.random() < 0.5)
        if self.rng.random() < 0.3 and '\\"' not in body:
            return "'" + body[1:-1].replace("'", "\\'") + "'"
        return body

    def key(self, name: str) -> None:
        plain = re.fullmatch(r"[A-Za-z_][\w.-]*", name, re.ASCII)
        # A bare key ends at white space or ':' only, so a comment must not touch it.
        self.text += f"{name} " if plain and self.rng.random() < 0.5 else self.quoted(name)

    def value(self, value: Any, path: KeyPath) -> None:
        if isinstance(value, dict):
            self.text += "{"
            self.members(value, path)
            self.text += "}"
        elif isinstance(value, list):
            self.text += "["
            for index, item in enumerate(value):
                self.space()
                self.lines[(*path, index)] = self.line()
                self.value(item, (*path, index))
                self.separator(last=index == len(value) - 1)
            self.space()
            self.text += "]"
        elif isinstance(value, str):
            self.string(value)
        else:
            self.text += json.dumps(value)

    def string(self, text: str) -> None:
        bare = re.fullmatch(r"[A-Za-z][\w /#,}\]]*[\w#,]", text, re.ASCII)
        if bare and not re.match(r"(true|false|null|True|False|None|NaN|Infinity)\b", text) and self.rng.random() < 0.6:
            self.text += text + self.rng.choice(["\n", "  \n", "\r\n"])
        else:
            self.text += self.quoted(text)

    def separator(self, *, last: bool) -> None:
        if last and self.rng.random() < 0.6:
            return
        self.space()
        # A comma, or a line end in its place.
        self.text += self.rng.choice([",", ",", "\n", "# c\n"])

    def members(self, value: dict[str, Any], path: KeyPath) -> None:
        for index, (key, item) in enumerate(value.items()):
            self.space()
            self.lines[(*path, key)] = self.line()
            self.key(key)
            self.space()
            self.text += ":"
            self.space()
            self.value(item, (*path, key))
            self.separator(last=index == len(value) - 1)
        self.space()

    def document(self, value: dict[str, Any]) -> None:
        self.space()
        if value and self.rng.random() < 0.2:
            self.members(value, ())
        else:
            self.value(value, ())
        self.space()


@given(DOCUMENTS, st.integers(0, 2**32))
@settings(max_examples=400, deadline=None)
def test_every_place_and_value_is_found_whatever_the_layout(document: dict[str, Any], seed: int) -> None:
    render = Render(random.Random(seed))
    render.document(document)
    parsed = parse(render.text)
    assert parsed.data == document
    assert dict(parsed.lines) == render.lines
    assert parsed.duplicates == ()


@given(DOCUMENTS)
@settings(max_examples=150, deadline=None)
def test_json_is_read_as_json(document: dict[str, Any]) -> None:
    for indent in (None, 2):
        text = json.dumps(document, indent=indent)
        assert parse(text).data == json.loads(text)


def test_types_of_numbers_are_those_of_json() -> None:
    data = parse('{"i": 16, "f": 16.0, "e": 5e8, "n": -0.5, "big": 123456789012345678901234567890}').data
    assert [type(value) for value in data.values()] == [int, float, float, float, int]
    assert data["big"] == 123456789012345678901234567890


AGREED = [
    "{a: 1 # c\n}",
    "{a: 1 /* c */}",
    "a: 1\nb: 2",
    "a: cpu, # x\nb: 1",
    "a: x // c",
    "{a: 'it\\'s'}",
    "{a: [1,2,]}",
    "{a: [1\n2\nx y\n]}",
    "{a: 01\n}",
    "{a: -\n}",
    "{a: 1.\n}",
    "{a: .5\n}",
    "{a: 0x10\n}",
    "{a: +1\n}",
    "{a: true b\n}",
    "{a: truely\n}",
    "{a: nullable\n}",
    "{a:{b:1}c:2}",
    '{a: "x" b: 2}',
    "{a: 1\t,b: x\t \n}",
    '{"a":1}//x',
    "",
    "# c",
    "\n{a: '''\n   l1\n   l2\n   '''}",
    "{\n  a:\n    '''\n    l1\n      l2\n    '''\n}",
    "\n{a: '''x''' b: 1}",
    "\n{a: '''one\n  two''' b: 1}",
    "\ufeff{a: 1}",
    '{a: "\\u0041\\ud83d\\ude00\\/\\b\\f\\n\\r\\t"}',
    "{a: 1}\n\n",
    '{"": 1}',
    "{a: 1 , b: 2 , }",
    "{a-b.c: 1, é: 2}",
]


@pytest.mark.parametrize("text", AGREED)
def test_same_values_as_the_hjson_package(text: str) -> None:
    assert parse(text).data == hjson.loads(text)


REFUSED = [
    ('{"a" 1}', 1, 6, "expected ':' after the key 'a'"),
    ("{a b: 1}", 1, 4, "expected ':' after the key 'a'"),
    ("{a: 1,, b: 2}", 1, 7, "expected a key, found ','"),
    ("{,}", 1, 2, "expected a key"),
    ("{a: 1} x", 1, 8, "expected the end of the document, found 'x'"),
    ("{a: 1 }}", 1, 8, "expected the end of the document"),
    ("{a: 1", 1, 1, "this { is never closed"),
    ("{\n a: [1,\n 2\n", 2, 5, "this [ is never closed"),
    ('{a: "x\ny"}', 1, 5, "the line ends inside a quoted string"),
    ('{a: "x', 1, 5, "the text ends inside a quoted string"),
    ('{a: "\t"}', 1, 5, "'\\t' stands inside a quoted string"),
    ('{a: "\\q"}', 1, 6, "\\q is no escape"),
    ('{a: "\\', 1, 6, "\\ is no escape"),
    ('{a: "\\u12"}', 1, 6, "\\u needs four hexadecimal digits"),
    ('{a: "\\ud800"}', 1, 12, "\\ud800 is half of a surrogate pair"),
    ("{a::1}", 1, 4, "a has no value: found ':'"),
    ("{a:", 1, 4, "a has no value"),
    ("{a: }", 1, 5, "a has no value: found '}'"),
    ("{\n\na: True}", 3, 4, "True is no JSON value"),
    ("{a: NaN, b: 1}", 1, 5, "NaN is no JSON value"),
    ("{a: -Infinity}", 1, 5, "-Infinity is no JSON value"),
    ("{a: 1e999}", 1, 5, "1e999 is beyond the largest float64"),
    ("{a: " + "9" * 500 + "}", 1, 5, "a number of 500 digits"),
    ("{a: /* x", 1, 5, "this comment is never closed"),
    ("{a: '''x", 1, 5, "this ''' string is never closed"),
    ("hello", 1, 6, "expected ':' after the key 'hello'"),
    ("[" * 70 + "]" * 70, 1, 66, "more than 64 objects and lists"),
]


@pytest.mark.parametrize(("text", "line", "column", "message"), REFUSED)
def test_what_is_not_hjson_is_refused_with_line_and_column(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "cfg.json")
    assert caught.value.code == "config-syntax"
    assert caught.value.message.startswith(f"cfg.json:{line}:{column}: {message}")


def test_the_unquoted_text_that_swallowed_the_bracket_is_named() -> None:
    with pytest.raises(ConfigError, match=r"line 2: the unquoted text 'cpu\}' runs to the end of its line") as caught:
        parse('{"a": 1,\n "device": cpu}')
    assert "this { is never closed" in caught.value.message


def test_duplicates_keep_the_first_value_and_its_places() -> None:
    parsed = parse('{\n "a": {"x": 1},\n "b": {"c": 2, \n"c": 3},\n "a": {"x": 5,\n "y": [1]}}')
    assert parsed.data == {"a": {"x": 1}, "b": {"c": 2}}
    assert [(d.path, d.first_line, d.line) for d in parsed.duplicates] == [(("b", "c"), 3, 4), (("a",), 2, 5)]
    assert dict(parsed.lines) == {("a",): 2, ("a", "x"): 2, ("b",): 3, ("b", "c"): 3}


@given(st.text(st.sampled_from(list("{}[]:,\"'#/*\\ \n\tabu01-.eE")), max_size=40))
@example("{a: '''\n'''}")
@example("'''")
@example("{'': ''' '''")
@settings(max_examples=600, deadline=None)
def test_no_text_makes_the_parser_fail_in_another_way(text: str) -> None:
    try:
        parsed = parse(text)
    except ConfigError as error:
        assert error.code == "config-syntax"  # noqa: PT017
    else:
        assert isinstance(parsed.data, dict | list)


def test_dotted_paths() -> None:
    assert dotted(("a", "b", 0, "c")) == "a.b[0].c"
    assert dotted(("groups", "layer.1", 'say "x"')) == 'groups."layer.1"."say \\"x\\""'
    assert dotted(()) == ""
