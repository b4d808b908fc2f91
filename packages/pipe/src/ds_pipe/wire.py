"""How values travel between stages: any pytree as one flat message, its shapes told once.

Words: a *signature* is everything about a value but the numbers in its tensors; a *link* is one direction between two stages, on
which messages are received in the order they were sent. A message is a header, then every tensor at a multiple of 64 bytes.
The header names the signature. A steady message is one transfer with no Python object in it. When a value has another signature
than the one before it, a message of the old size announces the new one (and describes it if it is new), and the value follows.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten_with_path, tree_unflatten, treespec_dumps, treespec_loads

from ds_config.errors import CommError, UnsupportedError

__all__ = ["Link", "Message", "Signature", "describe", "views"]

_ALIGN = 64
_HEADER = 64  # eight int64: signature, announced signature, bytes of its description
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


class Message(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Return when it is over."""


class Pipe(Protocol):
    """What moves bytes: one direction between two ranks, in order."""

    def send(self, data: Tensor) -> Message:
        """Start sending a flat uint8 tensor, which must not change before the message is over."""

    def recv(self, data: Tensor) -> Message:
        """Start receiving into it."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Shape of a value.

    Attributes:
        tree: torch's description of the containers, as JSON.
        leaves: Of every leaf either `("tensor", dtype, shape, requires_grad)` or `("value", constant)`.
    """

    tree: str
    leaves: tuple[tuple[Any, ...], ...]

    @property
    def tensors(self) -> list[tuple[torch.dtype, tuple[int, ...], bool]]:
        """Dtype, shape and whether it carries a gradient, of every tensor."""
        return [(_DTYPES[leaf[1]], tuple(leaf[2]), leaf[3]) for leaf in self.leaves if leaf[0] == "tensor"]

    @property
    def gradients(self) -> list[tuple[torch.dtype, tuple[int, ...], bool]]:
        """Of the tensors those that carry gradients."""
        return [t for t in self.tensors if t[2]]

    def encoded(self) -> bytes:
        return json.dumps([self.tree, self.leaves]).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Signature:
        tree, leaves = json.loads(data)
        return cls(
            tree, tuple((*leaf[:2], *([tuple(leaf[2]), leaf[3]] if leaf[0] == "tensor" else [])) for leaf in leaves)
        )


def describe(value: Any, where: str) -> tuple[Signature, list[Tensor]]:
    """The signature of a value and its tensors.

    Raises:
        UnsupportedError: a leaf cannot travel ("pipe-travel"); names it.
    """
    pairs, spec = tree_flatten_with_path(value)
    leaves: list[tuple[Any, ...]] = []
    tensors: list[Tensor] = []
    for path, leaf in pairs:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            leaves.append(("tensor", str(leaf.dtype)[6:], tuple(leaf.shape), leaf.requires_grad))
            tensors.append(leaf)
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            leaves.append(("value", leaf))
        else:
            name = "".join(str(part) for part in path) or "the value itself"
            raise UnsupportedError(
                f"{where}: {name} is a {type(leaf).__name__}, which cannot travel between stages",
                code="pipe-travel",
                fix="Pass tensors, None, bool, int, float and str, in tuples, lists and dicts; make anything else from them.",
            )
    return Signature(_dump(spec, where), tuple(leaves)), tensors


def _dump(spec: TreeSpec, where: str) -> str:
    found = _trees.get(spec)
    if found is None:
        try:
            found = _trees[spec] = treespec_dumps(spec)
        except NotImplementedError as error:
            raise UnsupportedError(
                f"{where}: a container of the value cannot be described to another rank: {error}",
                code="pipe-travel",
                fix="Return tuples, lists or dicts from the last layer of a stage.",
            ) from error
    return found


_trees: dict[TreeSpec, str] = {}
_specs: dict[str, TreeSpec] = {}


def views(data: Tensor, tensors: list[tuple[torch.dtype, tuple[int, ...], bool]], start: int) -> list[Tensor]:
    """The tensors that a flat uint8 message holds from `start`, without copying."""
    found, at = [], start
    for dtype, shape, _ in tensors:
        nbytes = prod(shape) * dtype.itemsize
        found.append(data[at : at + nbytes].view(dtype).view(shape))
        at += _padded(nbytes)
    return found


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def message_bytes(tensors: list[tuple[torch.dtype, tuple[int, ...], bool]]) -> int:
    """Bytes of a message's body."""
    return sum(_padded(prod(shape) * dtype.itemsize) for dtype, shape, _ in tensors)


class Link:
    """One direction between two stages: `send` on one rank, `expect` and `receive` on the other.

    Args:
        name: For messages: "stage 0 -> 1".
        pipe: Moves the bytes.
        device: Of the tensors.
    """

    def __init__(self, name: str, pipe: Pipe, device: torch.device) -> None:
        self.name, self._pipe, self._device = name, pipe, device
        self._known: list[Signature] = []
        self._numbers: dict[Signature, int] = {}
        self._current = -1
        self._size = _HEADER
        self._sending: deque[tuple[Message, Tensor]] = deque()
        self._coming: tuple[Message, Tensor] | None = None

    # ---- the sender

    def send(self, value: Any) -> Signature:
        """Start sending a value."""
        signature, tensors = describe(value, self.name)
        number = self._numbers.get(signature)
        if number != self._current or number is None:
            number = self._announce(signature, number)
        data = self._message(number)
        for view, tensor in zip(views(data, signature.tensors, _HEADER), tensors, strict=True):
            view.copy_(tensor.detach())
        self._start(data)
        return signature

    def _announce(self, signature: Signature, number: int | None) -> int:
        text = b"" if number is not None else signature.encoded()
        if number is None:
            number = self._numbers[signature] = len(self._known)
            self._known.append(signature)
        data = self._message(self._current)
        head = data[:_HEADER].view(torch.int64)
        head[1], head[2] = number + 1, len(text)
        self._start(data)
        if text:
            self._start(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device))
        self._switch(number)
        return number

    def _message(self, number: int) -> Tensor:
        data = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        head = data[:_HEADER].view(torch.int64)
        head.zero_()
        head[0] = number
        return data

    def _start(self, data: Tensor) -> None:
        self._sending.append((self._pipe.send(data), data))
        while len(self._sending) > 32:
            self._sending.popleft()[0].wait()

    def send_gradients(self, grads: list[Tensor | None], signature: Signature) -> None:
        """Start sending the gradients of a value with this signature, which was received. An absent one counts zero."""
        wanted = signature.gradients
        data = torch.empty(message_bytes(wanted), dtype=torch.uint8, device=self._device)
        for view, grad in zip(views(data, wanted, 0), grads, strict=True):
            view.zero_() if grad is None else view.copy_(grad)
        if data.numel():
            self._start(data)

    # ---- the receiver

    def expect(self) -> None:
        """Post the receive of the next value, so that it can arrive while this rank computes."""
        if self._coming is None:
            data = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            self._coming = (self._pipe.recv(data), data)

    def receive(self) -> tuple[Any, Signature]:
        """The next value, whose tensors are views of one message, and its signature."""
        data = self._next()
        number, announced, length = data[:_HEADER].view(torch.int64)[:3].tolist()
        if announced:
            if length:
                text = torch.empty(length, dtype=torch.uint8, device=self._device)
                self._pipe.recv(text).wait()
                self._known.append(Signature.decoded(bytes(text.cpu().numpy())))
            self._switch(announced - 1)
            data = self._next()
            number = int(data[:_HEADER].view(torch.int64)[0])
        if number != self._current:
            raise CommError(
                f"{self.name}: a message of signature {number} came where {self._current} was expected",
                code="pipe-link",
                fix="Run the same program on every rank of the pipeline.",
            )
        signature = self._known[number]
        tensors = iter(views(data, signature.tensors, _HEADER))
        leaves: list[Any] = []
        for leaf in signature.leaves:
            if leaf[0] == "value":
                leaves.append(leaf[1])
            else:
                tensor = next(tensors)
                leaves.append(tensor.requires_grad_(True) if leaf[3] and torch.is_grad_enabled() else tensor)
        if signature.tree not in _specs:
            _specs[signature.tree] = treespec_loads(signature.tree)
        return tree_unflatten(leaves, _specs[signature.tree]), signature

    def _next(self) -> Tensor:
        self.expect()
        coming, self._coming = self._coming, None
        if coming is None:
            raise RuntimeError("no receive was posted")
        coming[0].wait()
        return coming[1]

    def receive_gradients(self, signature: Signature) -> list[Tensor]:
        """The gradients of a value with this signature, which was sent."""
        wanted = signature.gradients
        data = torch.empty(message_bytes(wanted), dtype=torch.uint8, device=self._device)
        if data.numel():
            self._pipe.recv(data).wait()
        return views(data, wanted, 0)

    # ---- both

    def _switch(self, number: int) -> None:
        self._current = number
        self._size = _HEADER + message_bytes(self._known[number].tensors)

    def flush(self) -> None:
        """Wait until everything that was sent is on its way out of its memory."""
        while self._sending:
            self._sending.popleft()[0].wait()
