"""Client states: every kind of value goes and comes back with its type; what cannot be stored is named; no file runs anything."""

from __future__ import annotations

import argparse
import array
import base64
import dataclasses
import enum
import functools
import importlib
import json
import math
import pathlib
import random
import re
import subprocess
import sys
import textwrap
import threading
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_ckpt.client_state import decode, encode, has_tags
from ds_ckpt.client_values import DECODERS
from ds_ckpt.imported_classes import BASES, imported_class
from ds_ckpt.jsontext import dump, from_json, parse, to_json
from ds_config.errors import CheckpointError, UnsupportedError

RAN: list[str] = []  # what a load must not run


class Meter:
    """A running average as training scripts define it: attributes, and nothing else."""

    def __init__(self, name: str) -> None:
        RAN.append(name)
        self.name, self.values, self.seen = name, np.arange(3.0), OrderedDict(train=[1.5])

    def __setattr__(self, name: str, value: object) -> None:
        RAN.append(name)
        object.__setattr__(self, name, value)


class SlottedMeter(Meter):
    __slots__ = ("parent",)


class Single:
    def __new__(cls) -> Single:
        return RAN.append("new") or object.__new__(cls)  # type: ignore[func-returns-value]


class Restored:
    def __setstate__(self, state: object) -> None:
        RAN.append("state")


class Holder:
    def __init__(self, inner: object) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, object]:
        return {"inner": self.inner}


class Colour(enum.Enum):
    RED = 1
    CRIMSON = 1
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1


class Mode(str, enum.Enum):  # what programs of older Pythons have  # noqa: UP042
    MIN = "min"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Wide(enum.IntFlag):
    A = 1
    B = 2


@dataclasses.dataclass
class Trainer:
    step: int
    best: float = math.inf
    tags: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        RAN.append("post_init")
        self.derived = self.step * 2

    class Inner(enum.Enum):
        X = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: float = 0.5


@dataclasses.dataclass(slots=True)
class Child(Trainer):
    more: Any = None


class Pair(NamedTuple):
    left: int
    right: Any = None


Triple = namedtuple("Triple", "a b c")


class EasyDict(dict):
    def __init__(self) -> None:
        RAN.append("EasyDict")

    def __setattr__(self, name: str, value: Any) -> None:
        RAN.append("setattr")
        dict.__setitem__(self, name, value)

    __setitem__ = __setattr__  # type: ignore[assignment]


class Word(str):
    __slots__ = ("note",)


class Options(argparse.Namespace):
    pass


class Bomb:
    def __init__(self) -> None:
        RAN.append("Bomb")

    def __del__(self) -> None:
        RAN.append("del")


@dataclasses.dataclass
class Fuse:
    wire: int = 0

    def __del__(self) -> None:
        RAN.append("fuse")


@dataclasses.dataclass(frozen=True)
class Key:
    name: str


@dataclasses.dataclass
class OwnHash:
    name: str = ""

    def __hash__(self) -> int:
        RAN.append("hash")
        return 0


@dataclasses.dataclass
class OwnState:
    name: str = ""

    def __getstate__(self) -> Any:
        return {}


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        RAN.append(f"meta {name}")
        return super().__getattribute__(name)


class Watched(metaclass=Meta):
    pass


def there_and_back(value: Any) -> Any:
    """Through the very bytes that a manifest has."""
    RAN.clear()
    coded = encode(value)
    text = dump(to_json(coded)).encode()
    RAN.clear()
    out = decode(from_json(parse(text, "test")))
    assert RAN == []
    return out


def same(a: Any, b: Any) -> bool:
    """Equality that looks at types, NaN and order, too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        return alike and torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())
    if isinstance(a, Decimal):  # a signalling NaN refuses to be compared
        return str(a) == str(b)
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


VALUES = {
    "json": {"a": [1, 2.5, "x", True, None], "": {}},
    "keys": {1: "one", "~": "tilde", "$float": 2, None: 3, (1, (2,)): 4, 1.5: 5, Key("k"): 6, Colour.RED: 7},
    "numbers": [
        float("inf"),
        -math.inf,
        math.nan,
        -0.0,
        2**63,
        -(2**63) - 1,
        2**64,
        10**5000,
        1 + 2j,
        complex(math.nan, -math.inf),
    ],
    "containers": [
        (1, [2]),
        (),
        {3},
        frozenset({4, (5,)}),
        set(),
        deque([1, {2}], 3),
        deque(),
        range(1, 9, 2),
        slice(1, None, (2,)),
    ],
    "dicts": [OrderedDict(b=1, a=2), Counter("hello"), defaultdict(list, {1: [2]}), defaultdict(None, a=1)],
    "bytes": [b"\x00\xff", bytearray(b"ab"), b"", ..., NotImplemented],
    "texts": ["\ud800", "\0", "\U0001f600"],
    "times": [
        date(2024, 2, 29),
        time(1, 2, 3, 4),
        time(1, fold=1, tzinfo=UTC),
        datetime(2024, 1, 1, 2, 3, 4, 5, timezone(timedelta(hours=-5), "EST"), fold=1),
        datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        timedelta(-1, 5, 7),
        timedelta.max,
        timezone(timedelta(minutes=90)),
        datetime.max,
    ],
    "exact": [
        Decimal("1.10"),
        Decimal("-0"),
        Decimal("sNaN"),
        Decimal("Infinity"),
        Fraction(1, 3),
        Fraction(10**40, 3),
    ],
    "uuid": [uuid.UUID(int=5), uuid.uuid1()],
    "paths": [pathlib.Path("/a/b"), pathlib.PurePosixPath("c"), pathlib.PureWindowsPath("C:/x")],
    "spaces": [argparse.Namespace(lr=0.1, **{"~": (1,), "a b": 1}), SimpleNamespace(a=argparse.Namespace())],
    "torch": [torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3]), torch.sparse_coo, torch.channels_last],
    "tensors": [
        torch.arange(6, dtype=torch.int32).view(2, 3).t(),
        torch.tensor(2.0, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.tensor([1 + 2j], dtype=torch.complex128).conj(),
        torch.zeros(0, 3, dtype=torch.uint16),
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False),
        torch.ones(3, requires_grad=True),
    ],
    "numpy": [
        np.arange(3)[::-1],
        np.asfortranarray(np.ones((2, 3), ">f4")),
        np.array(["a", "bcd"]),
        np.array([(1, 2.0)], dtype=[("i", "i4"), ("f", "f8")]),
        np.array("2024-01-01", "M8[D]"),
        np.zeros((0, 4), np.uint64),
        np.float64(1.5),
        np.int8(3),
        np.bool_(True),
        np.str_("x"),
        np.datetime64("2024-01-01T00:00", "ns"),
        np.complex64(1j),
    ],
    "random": [
        random.Random(3).getstate(),
        np.random.RandomState(1).get_state(),
        np.random.default_rng(1).bit_generator.state,
    ],
    "enums": [
        Colour.RED,
        Colour.BLUE,
        Level.LOW,
        Mode.MIN,
        Access.READ,
        Access.READ | Access.WRITE,
        Access(0),
        Wide(3),
        Trainer.Inner.X,
    ],
    "dataclasses": [Trainer(3), Trainer(3, math.nan, ["a"]), Point(1), Child(1, more=Point(2, -0.0)), {Point(1): 1}],
    "namedtuples": [Pair(1), Pair(1, [Pair(2, (3,))]), Triple(1, 2, {"x": Colour.RED})],
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_with_their_types(name: str) -> None:
    values = VALUES[name]
    back = there_and_back(values)
    for value, other in zip(*((v.items() if isinstance(v, dict) else v) for v in (values, back)), strict=True):
        assert same(value, other) or repr(value) == repr(other), (value, other)  # a NaN inside is itself to nobody
    assert type(back) is type(values)


def test_subclasses_of_builtins_come_back_without_their_methods() -> None:
    easy = EasyDict()
    dict.update(easy, a=1, b={"c": EasyDict()})
    easy.__dict__["hidden"] = (1,)
    back = there_and_back({"e": easy})["e"]
    assert type(back) is EasyDict
    assert dict(back) == dict(easy)
    assert type(back["b"]["c"]) is EasyDict
    assert back.__dict__ == {"hidden": (1,)}
    word = Word("text")
    word.note = [1]  # type: ignore[attr-defined]
    back = there_and_back([word])[0]
    assert (type(back), back, back.note) == (Word, "text", [1])
    options = there_and_back([Options(a=1)])[0]
    assert (type(options), vars(options)) == (Options, {"a": 1})


def test_attributes_beside_fields_and_in_ordered_dicts_stay() -> None:
    trainer, state = Trainer(1), OrderedDict(w=torch.ones(1))
    trainer.extra, state._metadata = {"x": (1,)}, {"version": 1}  # type: ignore[attr-defined]
    back = there_and_back([trainer, state])
    assert vars(back[0]) == vars(trainer)
    assert back[1]._metadata == {"version": 1}
    del trainer.tags
    assert vars(there_and_back(trainer)) == vars(trainer)


def cyclic() -> Any:
    value: dict[str, Any] = {"a": []}
    value["a"].append({"b": value})
    return value


def local_class() -> Any:
    @dataclasses.dataclass
    class Local:
        x: int = 0

    return Local()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"sched": {"f": [1, object()]}}, r'client_state\["sched"\]\["f"\]\[1\] is a builtins.object'),
        ({"f": print}, r'client_state\["f"\] is code \(print\)'),
        ({"c": Colour}, r'client_state\["c"\] is code \(Colour\)'),
        ({"l": functools.partial(print)}, r"is code"),
        ({"a": cyclic()}, r'\["a"\]\["a"\]\[0\]\["b"\] is the object that it lies in, client_state\["a"\]'),
        ({"n": functools.reduce(lambda x, _: [x], range(200), 0)}, "lies deeper than 80"),
        ({"x": local_class()}, "nobody could find again"),
        ({"m": nn.Linear(1, 1)}, r"torch.nn.modules.linear.Linear; store its state_dict\(\)"),
        ({"w": np.array([object()])}, "array of object"),
        ({"w": np.ma.array([1], mask=[True])}, r"MaskedArray; store numpy.asarray"),
        ({"d": defaultdict(lambda: 1)}, "defaultdict of <function"),
        ({"s": torch.zeros(2, 2).to_sparse()}, "layout torch.sparse_coo"),
        ({"s": torch.zeros(2, device="meta")}, "on meta"),
        ({"m": types.MappingProxyType({})}, r"mappingproxy; store dict\(\) of it"),
        ({"b": Fuse()}, "__del__"),
        ({OwnHash("k"): 1}, "own __hash__ or __eq__"),
        ({"b": OwnState()}, "a __getstate__ of its own"),
        ({"b": Restored()}, "Restored, which has no form here: its class has a __setstate__ of its own"),
        ({"i": iter([])}, "list_iterator"),
        ({"e": ValueError("x")}, "ValueError"),
        ({"t": datetime(2024, 1, 1, tzinfo=type("Z", (type(UTC).__base__,), {})())}, r"datetime|Z"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        encode(value)
    assert caught.value.code == "ckpt-client-state"


def test_a_plain_object_comes_back_with_its_attributes_and_nothing_of_it_runs() -> None:
    meter = SlottedMeter("loss")
    meter.parent = {"of": Meter("all")}
    coded = json.loads(json.dumps(encode({"meters": [meter]})))
    RAN.clear()
    (back,) = decode(coded)["meters"]
    assert RAN == []
    assert type(back) is SlottedMeter
    assert type(back.parent["of"]) is Meter
    assert (back.name, back.seen, back.parent["of"].name) == ("loss", OrderedDict(train=[1.5]), "all")
    np.testing.assert_array_equal(back.values, meter.values)


@pytest.mark.parametrize(
    "value",
    [Single(), Holder(1), threading.Lock(), re.compile("x"), torch.Generator(), random.Random(1), array.array("i")],
)
def test_an_object_that_is_more_than_its_attributes_is_refused(value: object) -> None:
    with pytest.raises(UnsupportedError, match=type(value).__qualname__):
        encode({"value": value})
    RAN.clear()
    refused(
        {
            "~": "derived",
            "class": f"{type(value).__module__}:{type(value).__qualname__}",
            "base": "object",
            "value": None,
        }
    )
    assert RAN == []


def test_all_problems_come_at_once() -> None:
    with pytest.raises(UnsupportedError) as caught:
        encode({str(i): object() for i in range(10)})
    assert caught.value.message.count("builtins.object") == 8
    assert "and 2 more" in caught.value.message


def test_an_object_that_is_there_twice_is_no_circle() -> None:
    shared = [1]
    assert there_and_back({"a": shared, "b": shared, "c": (shared, shared)}) == {"a": [1], "b": [1], "c": ([1], [1])}


def test_deep_states_of_any_kind_fit_a_meta() -> None:
    for wrap in (lambda x: (x,), lambda x: [x], lambda x: {1: x}, lambda x: Pair(1, x), lambda x: Trainer(1, x)):
        value = functools.reduce(lambda x, _, wrap=wrap: wrap(x), range(75), 0)
        assert there_and_back(value) == value


# ---- classes that are not there, or have changed


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    new = types.ModuleType("a_clients_module")
    monkeypatch.setitem(sys.modules, new.__name__, new)

    def define(source: str) -> Any:
        exec(textwrap.dedent(source), new.__dict__)
        return new

    define("import dataclasses, enum\nfrom typing import NamedTuple, Any")
    return define


def refused(coded: Any, code: str = "ckpt-client-class") -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        decode(coded)
    assert caught.value.code == code, caught.value
    return caught.value


def test_a_class_whose_module_is_not_imported_is_named_and_not_imported(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded = encode({"cfg": module("@dataclasses.dataclass\nclass C:\n x: int = 1").C()})
    monkeypatch.delitem(sys.modules, "a_clients_module")
    error = refused(coded)
    assert (
        'client_state["cfg"] is a dataclass, a_clients_module.C: its module a_clients_module is not imported'
        in error.message
    )
    assert "import a_clients_module" in error.fix
    for name in ("antigravity:fly", "this:d"):
        refused({"~": "enum", "class": name, "value": "X"})
        assert name.split(":")[0] not in sys.modules


def test_fields_that_have_changed(module: Any) -> None:
    coded = encode(module("@dataclasses.dataclass\nclass C:\n x: int = 1\n y: int = 2").C(5))
    new = module(
        "@dataclasses.dataclass\nclass C:\n x: int\n y: int\n z: int = 3\n w: list = dataclasses.field(default_factory=list)"
    )
    assert decode(coded) == new.C(5, 2, 3, [])
    module(
        "@dataclasses.dataclass\nclass C:\n x: int\n z: int\n f: Any = dataclasses.field(default_factory=lambda: 1/0)"
    )
    message = refused(coded).message
    assert "stored fields that it has no more: y" in message
    assert "new fields without a default: f, z" in message
    module("class C:\n pass")
    assert "that is no dataclass" in refused(coded).message
    module("del C")
    assert "has no class C" in refused(coded).message


def test_enums_and_namedtuples_that_have_changed(module: Any) -> None:
    new = module(
        "class E(enum.Enum):\n A = 1\n B = 2\nclass N(NamedTuple):\n a: int\n b: int\nclass F(enum.Flag):\n A = 1\n B = 2"
    )
    member, pair, flag = encode(new.E.A), encode(new.N(1, 2)), encode(new.F(3))
    new = module("class E(enum.Enum):\n B = 1\nclass N(NamedTuple):\n b: int\n a: int\nclass F(enum.Flag):\n A = 1")
    assert "no member 'A', but B" in refused(member).message
    assert decode(pair) == new.N(b=2, a=1)
    refused(flag)
    module("class N(NamedTuple):\n a: int\nclass E: pass")
    assert "its fields were a, b at the save, and are a" in refused(pair).message
    assert "no enum" in refused(member).message


def test_main_is_found_by_the_next_run_of_a_script(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import dataclasses, json, sys
        from ds_ckpt.client_state import decode, encode

        @dataclasses.dataclass
        class Config:
            x: int

        if sys.argv[1] == "save":
            print(json.dumps(encode({"c": Config(3)})))
        else:
            assert decode(json.loads(sys.argv[2])) == {"c": Config(3)}
        """)
    )
    saved = subprocess.run([sys.executable, script, "save"], check=True, capture_output=True, text=True).stdout
    subprocess.run([sys.executable, script, "load", saved], check=True)
    assert "__main__.Config" in refused(json.loads(saved)).message


# ---- files of strangers


HERE = __name__


@pytest.mark.parametrize(
    "value",
    [
        {"~": "dtype", "value": "os"},
        {"~": "dtype", "value": "nn.Linear"},
        {"~": "dtype", "value": "float32", "more": 1},
        {"~": "device", "value": "toaster"},
        {"~": "tensor", "value": "AAAA"},
        {"~": "tensor"},
        {"~": ["dtype"], "value": 1},
        {"~": None},
        {"~": "dict", "value": [[[], 1]]},
        {"~": "dict", "value": [1]},
        {"~": "float", "value": None},
        {"~": "float", "value": "1e5"},
        {"~": "set", "value": 3},
        {"~": "set", "value": "abc"},
        {"~": "Namespace", "value": [1]},
        {"~": "Namespace", "value": {"__dict__": {}}},
        {"~": "date", "value": [2024, 13, 1]},
        {"~": "date", "value": ["a", 1, 1]},
        {"~": "zoneinfo", "value": "../../etc/passwd"},
        {"~": "zoneinfo", "value": "a.b.c"},
        {"~": "defaultdict", "factory": "eval", "value": []},
        {"~": "constant", "value": "exit"},
        {"~": "deque", "maxlen": -1, "value": []},
        {"~": "Size", "value": ["a"]},
        {"~": "Fraction", "value": [1, 0]},
        {"~": "complex", "value": ["1", 2.0]},
        {"~": "array", "value": 1},
        {"~": "ndarray", "value": "AAAA"},
        {"~": "enum", "class": 1, "value": "x"},
        {"~": "enum", "value": "x"},
        {"~": "enum", "class": f"{HERE}:Colour", "value": 1},
        {"~": "flag", "class": f"{HERE}:Access", "value": "x"},
        {"~": "dataclass", "class": f"{HERE}:Point", "value": [["x", 1], ["y", 2]], "unset": [], "state": [["z", 1]]},
        {"~": "dataclass", "class": f"{HERE}:Point", "value": {"x": 1, "y": 2}, "unset": [], "state": []},
        {"~": "derived", "class": f"{HERE}:EasyDict", "base": "dict", "value": [1]},
        {"~": "derived", "class": f"{HERE}:EasyDict", "base": "type", "value": {}},
        {"~": "derived", "class": f"{HERE}:EasyDict", "base": "dict", "value": {}, "state": [["__dict__", {}]]},
    ],
)
def test_a_client_state_that_nothing_wrote_is_refused(value: Any) -> None:
    RAN.clear()
    with pytest.raises(CheckpointError) as caught:
        decode({"a": [value]})
    assert caught.value.code == "ckpt-client-state"
    assert RAN == []


@pytest.mark.parametrize(
    "value",
    [
        {"~": "enum", "class": "os:system", "value": "x"},
        {"~": "enum", "class": "builtins:int", "value": "x"},
        {"~": "enum", "class": "nothing", "value": "x"},
        {"~": "enum", "class": f"{HERE}:Colour.__class__", "value": "x"},
        {"~": "enum", "class": f"{HERE}:RAN.append", "value": "x"},
        {"~": "flag", "class": f"{HERE}:Colour", "value": 1},
        {"~": "flag", "class": f"{HERE}:Access", "value": 1 << 70},
        {"~": "derived", "class": "collections:OrderedDict", "base": "dict", "value": {}},
        {"~": "derived", "class": f"{HERE}:Colour", "base": "dict", "value": {}},
        {"~": "derived", "class": f"{HERE}:Bomb", "base": "dict", "value": {}},
        {"~": "dataclass", "class": f"{HERE}:Bomb", "value": [], "unset": [], "state": []},
        {"~": "dataclass", "class": f"{HERE}:Fuse", "value": [["wire", 1]], "unset": [], "state": []},
        {"~": "dataclass", "class": f"{HERE}:OwnState", "value": [], "unset": [], "state": []},
        {"~": "dataclass", "class": f"{HERE}:Watched", "value": [], "unset": [], "state": []},
        {"~": "derived", "class": "subprocess:Popen", "base": "dict", "value": {}},
        {"~": "set", "value": [{"~": "dataclass", "class": f"{HERE}:OwnHash", "value": [], "unset": [], "state": []}]},
    ],
)
def test_a_class_that_is_none_of_these_is_refused_and_nothing_of_it_runs(value: Any) -> None:
    importlib.import_module("subprocess")
    RAN.clear()
    refused(value)
    assert RAN == []


def test_no_memory_is_taken_for_an_array_that_is_not_there() -> None:
    data = base64.b64decode(encode(np.zeros(1))["value"])
    huge = data.replace(b"(1,), }" + 11 * b" ", b"(999999999999,), }")
    assert len(huge) == len(data)
    assert huge != data
    for bad in (data[:-1], data + b"x", huge, data.replace(b"(1,)", b"(-1)"), data.replace(b"<f8", b"|O8")):
        refused({"~": "ndarray", "value": base64.b64encode(bad).decode()}, "ckpt-client-state")


def test_a_kind_of_a_newer_version_says_so() -> None:
    error = refused({"a": {"~": "interval", "value": 1}}, "ckpt-version")
    assert "'interval'" in error.message
    assert "Update" in error.fix


def test_a_module_that_answers_any_name_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = types.ModuleType("a_lazy_module")
    lazy.__getattr__ = lambda name: RAN.append(name) or Point  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_lazy_module", lazy)
    RAN.clear()
    refused({"~": "dataclass", "class": "a_lazy_module:Point", "value": [], "unset": [], "state": []})
    assert RAN == []
    assert imported_class(f"{HERE}:Trainer.Inner") is Trainer.Inner


def test_states_that_the_facade_wrote_before_are_read() -> None:
    old = {
        "t": {"~": "tuple", "value": [1, 2]},
        "k": {"~": "dict", "value": [[1, "one"]]},
        "a": {"~": "array", "value": encode(torch.arange(2))},
        "n": {"~": "Namespace", "value": {"lr": 0.1}},
        "f": {"~": "float", "value": "inf"},
        "p": {"~": "path", "value": "/a"},
    }
    back = decode(old)
    assert (back["t"], back["k"], back["f"], back["p"]) == ((1, 2), {1: "one"}, math.inf, pathlib.Path("/a"))
    assert back["n"] == argparse.Namespace(lr=0.1)
    assert back["a"].tolist() == [0, 1]


def test_what_needs_no_tags_has_none() -> None:
    assert not has_tags(encode({"a": [1, {"b": None}]}))
    assert has_tags(encode({"a": [{"b": (1,)}]}))


# ---- any


def code_of(coded: Any) -> str | None:
    """Return the code of the error that decoding raises."""
    try:
        decode(coded)
    except CheckpointError as error:
        return error.code
    return None


_KEYS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.binary(max_size=5), st.dates(), st.uuids(),
    st.sampled_from([*Colour, *Level]), st.builds(Point, st.integers()), st.builds(Key, st.text()),
)  # fmt: skip
_LEAVES = st.one_of(
    _KEYS, st.floats(), st.complex_numbers(), st.datetimes(timezones=st.timezones() | st.none()), st.timedeltas(), st.times(),
    st.decimals().filter(lambda d: not d.is_snan()), st.fractions(), st.builds(range, st.integers(), st.integers(), st.integers(1)),
    st.builds(Wide, st.integers(0, 3)), st.builds(np.float32, st.floats(width=32)), st.builds(bytearray, st.binary()),
)  # fmt: skip


def _more(inner: Any) -> Any:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(deque),
        st.dictionaries(_KEYS, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict),
        st.sets(_KEYS, max_size=4),
        st.frozensets(_KEYS, max_size=4),
        st.builds(Trainer, st.integers(), inner),
        st.builds(Pair, st.integers(), inner),
        st.builds(slice, inner, inner),
        st.builds(SimpleNamespace, a=inner),
    )


@settings(max_examples=150, deadline=None)
@given(st.recursive(_LEAVES, _more, max_leaves=12))
def test_any_state_comes_back(value: Any) -> None:
    back = there_and_back(value)
    assert same(value, back) or repr(value) == repr(back)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**65)
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["AAAA", "int32", "nan"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "~"]), inner, max_size=2),
    max_leaves=8,
)
_CLASSES = [
    f"{HERE}:{n}"
    for n in (
        "Colour",
        "Access",
        "Trainer",
        "Point",
        "Pair",
        "EasyDict",
        "Word",
        "Bomb",
        "Fuse",
        "OwnHash",
        "Watched",
        "RAN",
    )
]
_TAGS = st.fixed_dictionaries(
    {"~": st.sampled_from([*DECODERS, "enum", "flag", "dataclass", "namedtuple", "derived", "exec"]), "value": _JSON},
    optional={
        "class": st.sampled_from([*_CLASSES, "os:system", "antigravity:x", "builtins:eval", "enum:Enum"]),
        "base": st.sampled_from([*BASES, "object"]), "unset": st.lists(st.text(max_size=3)), "state": _JSON,
        "factory": st.sampled_from(["list", "exec", None]), "maxlen": _JSON, "parameter": _JSON, "requires_grad": _JSON, "complex128": _JSON,
    },
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(_TAGS)
def test_any_tag_is_a_value_or_an_error_and_runs_nothing(tag: Any) -> None:
    RAN.clear()
    before = set(sys.modules)
    code = code_of({"a": tag})
    assert code in (None, "ckpt-client-state", "ckpt-client-class", "ckpt-version")
    assert RAN == []
    assert {name for name in set(sys.modules) - before if not name.startswith(("numpy", "torch", "encodings"))} == set()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_state_with_one_thing_changed_is_a_value_or_an_error(data: Any) -> None:
    coded = encode(
        [value for values in VALUES.values() for value in (values.values() if isinstance(values, dict) else values)]
    )
    at, key = coded, data.draw(st.integers(0, len(coded) - 1))
    while isinstance(at[key], list | dict) and at[key] and data.draw(st.integers(0, 4)):
        at = at[key]
        key = data.draw(st.integers(0, len(at) - 1) if isinstance(at, list) else st.sampled_from(sorted(at)))
    at[key] = data.draw(_JSON)
    RAN.clear()
    code = code_of(coded)
    assert code in (None, "ckpt-client-state", "ckpt-client-class", "ckpt-version")
    assert RAN == []
