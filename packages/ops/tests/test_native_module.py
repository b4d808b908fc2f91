"""Loading, the stubs, and the shape of the built file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from ds_config.errors import KernelError
from ds_ops import _call, _native, module_cache


@pytest.fixture
def module() -> ModuleType:
    loaded = _native.load("_cpu")
    if loaded.module is None:
        pytest.skip(loaded.reason)
    return loaded.module


def stub(name: str) -> list[ast.stmt]:
    return ast.parse((Path(_native.__file__).parent / f"{name}.pyi").read_text()).body


def arguments(function: ast.FunctionDef) -> list[str] | None:
    """Names after `self`; None where the stub leaves them open (`*args`)."""
    return None if function.args.vararg else [a.arg for a in function.args.args if a.arg != "self"]


def built_arguments(function: object) -> list[str]:
    signature = (getattr(function, "__doc__", None) or "").splitlines()[0]
    return [a for a in re.findall(r"[(,] ?(\w+):", signature) if a != "self"]


def public(owner: object) -> set[str]:
    return {n for n in vars(owner) if not n.startswith("_")}


@pytest.mark.parametrize("name", ["_cpu", "_cuda"])
def test_stubs_match_the_module(name: str) -> None:
    module = _native.load(name).module
    if module is None:
        pytest.skip(_native.load(name).reason)
    nodes = stub(name)
    functions = {n.name: n for n in nodes if isinstance(n, ast.FunctionDef)}
    classes = {n.name: n for n in nodes if isinstance(n, ast.ClassDef)}
    values = {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    assert public(module) == set(functions) | set(classes) | values
    for each, node in functions.items():
        assert arguments(node) in (None, built_arguments(getattr(module, each))), each
    for each, definition in classes.items():
        methods = {m.name: m for m in definition.body if isinstance(m, ast.FunctionDef)}
        fields = {
            m.target.id for m in definition.body if isinstance(m, ast.AnnAssign) and isinstance(m.target, ast.Name)
        }
        built = getattr(module, each)
        assert public(built) == (set(methods) | fields) - {"__init__"}, each
        for method, node in methods.items():
            assert arguments(node) in (None, built_arguments(getattr(built, method))), f"{each}.{method}"


def test_the_module_links_no_torch(module: ModuleType) -> None:
    out = subprocess.run(["readelf", "-d", str(module.__file__)], capture_output=True, text=True)
    if out.returncode:
        pytest.skip("no readelf")
    needed = re.findall(r"NEEDED.*\[(.*)\]", out.stdout)
    assert needed
    assert not [n for n in needed if "torch" in n or "c10" in n or "python" in n]


def test_one_openmp_runtime(module: ModuleType) -> None:
    program = "from ds_ops import _native; _native.load('_cpu'); print(open('/proc/self/maps').read())"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert len(set(re.findall(r"\S*libgomp\S*", out))) <= 1


def test_a_missing_module_is_a_value_and_a_typed_error() -> None:
    loaded = _native.load("_absent")
    assert loaded.module is None
    assert "was not built" in loaded.reason
    with pytest.raises(KernelError, match="was not built") as caught:
        _call.native("_absent")
    assert caught.value.code == "kernel-missing"


def test_a_damaged_module_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / f"{version('ds-ops')}-cpu-k-k" / "lib"
    folder.mkdir(parents=True)
    (folder / f"_broken{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"not a library")
    monkeypatch.setenv("DS_OPS_CACHE", str(tmp_path))
    monkeypatch.setattr(module_cache, "source_dir", lambda: None)  # no sources that it could not be of
    loaded = _native.load("_broken")
    assert loaded.module is None
    assert "does not load" in loaded.reason


def test_build_info(module: ModuleType) -> None:
    info = _native.build_info()
    assert info["compiler"]
    assert module.isa_name() in info["isa_levels"]
