"""Tensors that our code makes name their device: who calls `torch.set_default_device("cuda")` got state of the host on the card."""

import ast

import pytest

from repo import ROOT

FACTORIES = frozenset(
    [
        "arange",
        "as_tensor",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "tensor",
        "zeros",
    ]
)
MODULES = {"bert_layer.py", "autoep_layer.py", "lora.py", "moe_layer.py"}
"""Files of layers whose parameters follow torch's default device, as those of torch.nn do."""


def without_device(source: str) -> list[int]:
    """Return the lines of calls of torch's factories that name no device."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr in FACTORIES) == ("torch", True)
        and not {"device", "out", None} & {keyword.arg for keyword in call.keywords}
    ]


def test_it_finds_calls_without_a_device():
    assert without_device("torch.zeros(3)\ntorch.zeros(3, device=d)\ntorch.full((1,), 2, **how)\ntorch.cat([])") == [1]


@pytest.mark.parametrize("package", sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir()))
def test_factories_name_their_device(package):
    files = [path for path in (ROOT / "packages" / package / "src").rglob("*.py") if path.name not in MODULES]
    found = {str(path.relative_to(ROOT)): lines for path in files if (lines := without_device(path.read_text()))}
    assert not found, f'pass device="cpu", or the device that is meant: {found}'
