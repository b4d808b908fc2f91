"""How values travel between stages: any pytree as tensors on a channel, its structure sent once.

Words: a *signature* is everything about a value but the numbers in its tensors; a *link* is the two directions between two stages:
values go forward, their gradients come back. `ds_comm.channels` carries tensors and settles their dtypes and shapes; a link adds
the structure: the first tensor of a forward message is the number of a known signature, or the description of a new one. Gradients
need neither: both sides know the value they belong to.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import ds_comm
from ds_comm.channels import Channels, Receiver, Sender
from ds_config.errors import CommError, UnsupportedError
from ds_config.rehearsing import is_rehearsal
from ds_pipe._torch import TreeSpec, tree_flatten_with_path, tree_unflatten, treespec_dumps, treespec_loads

__all__ = ["StageLink", "ValueStructure", "describe"]

_NUMBER = 8  # bytes of a head that is a number


@dataclass(frozen=True, slots=True)
class ValueStructure:
    """Structure of a value.

    Attributes:
        tree: torch's description of the containers, as JSON.
        leaves: Of every leaf either `("tensor", requires_grad)` or `("value", constant)`; `("tensor", requires_grad, number)` for one that is
            the same tensor as another before it, the one with this number among the tensors.
    """

    tree: str
    leaves: tuple[tuple[Any, ...], ...]

    @property
    def gradients(self) -> int:
        """How many tensors carry gradients."""
        return sum(1 for leaf in self.leaves if leaf[0] == "tensor" and leaf[1])

    def encoded(self) -> bytes:
        """Encode this signature as JSON, padded to be longer than a signature number."""
        return json.dumps([self.tree, self.leaves]).encode().ljust(_NUMBER + 1)

    @classmethod
    def decoded(cls, data: bytes) -> ValueStructure:
        """Decode the signature that `encoded` returned."""
        tree, leaves = json.loads(data)
        return cls(tree, tuple(tuple(leaf) for leaf in leaves))


def describe(value: Any, where: str) -> tuple[ValueStructure, list[Tensor]]:
    """Return the signature of a value and its tensors.

    Raises:
        UnsupportedError: a leaf cannot be sent ("pipe-unsupported-value"); the error names the leaf.
    """
    pairs, spec = tree_flatten_with_path(value)
    leaves: list[tuple[Any, ...]] = []
    tensors: list[Tensor] = []
    for path, leaf in pairs:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            first = next((number for number, other in enumerate(tensors) if _same(leaf, other)), None)
            leaves.append(("tensor", leaf.requires_grad, *(() if first is None else (first,))))
            tensors.append(leaf)
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            leaves.append(("value", leaf))
        else:
            name = "".join(str(part) for part in path) or "the value itself"
            raise UnsupportedError(
                f"{where}: {name} is a {type(leaf).__name__}, which cannot travel between stages",
                code="pipe-unsupported-value",
                fix="Pass tensors, None, bool, int, float and str, in tuples, lists and dicts; make anything else from them.",
            )
    return ValueStructure(_dump(spec, where), tuple(leaves)), tensors


def _same(tensor: Tensor, other: Tensor) -> bool:
    return (
        tensor.data_ptr() == other.data_ptr()
        and tensor.numel() > 0
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
        and tensor.dtype == other.dtype
    )


def _dump(spec: TreeSpec, where: str) -> str:
    text = _trees.get(spec)
    if text is None:
        try:
            text = _trees[spec] = treespec_dumps(spec)
        except NotImplementedError as error:
            raise UnsupportedError(
                f"{where}: a container of the value cannot be described to another rank: {error}",
                code="pipe-unsupported-value",
                fix="Return tuples, lists or dicts from the last layer of a stage.",
            ) from error
    return text


_trees: dict[TreeSpec, str] = {}
_specs: dict[str, TreeSpec] = {}


class _Work(Protocol):
    def wait(self) -> object: ...


class StageLink:
    """Between stage `low` on one rank and stage `low + 1` on another. Each end sends one way and receives the other.

    Args:
        channels: Of the pipeline's group.
        peer: The other rank in it.
        low: The lower stage.
        below: Whether this rank has the lower stage.
    Attributes:
        moved: Whether a message was sent or waited for since somebody set it to False.
    """

    def __init__(self, channels: Channels, peer: int, low: int, below: bool) -> None:
        self.name = f"stage {low} -> {low + 1}"
        self.moved = False
        forward, backward = 2 * low, 2 * low + 1
        self._sender: Sender = channels.sender(peer, forward if below else backward, unit="pipe")
        self._receiver: Receiver = channels.receiver(peer, backward if below else forward, unit="pipe")
        self._known: list[ValueStructure] = []
        self._heads: dict[ValueStructure, Tensor] = {}
        self._sending: deque[tuple[_Work, object]] = deque()
        self._group, self._peer = channels.group, peer
        self._gradients: deque[list[Tensor]] = deque()  # of a rehearsal: what will come back for what was sent

    # ---- forward

    def send(self, value: Any) -> ValueStructure:
        """Start sending a value. From the lower stage."""
        signature, tensors = describe(value, self.name)
        head = self._heads.get(signature)
        if head is None:
            number = len(self._heads).to_bytes(_NUMBER, "little")
            self._heads[signature] = torch.frombuffer(bytearray(number), dtype=torch.uint8)
            head = torch.frombuffer(bytearray(signature.encoded()), dtype=torch.uint8)
        self._start([head, *(t.detach() for t in tensors)])
        if is_rehearsal():
            self._gradients.append([torch.empty_like(t) for t in tensors if t.requires_grad])
        return signature

    def receive(self) -> tuple[Any, ValueStructure]:
        """Receive the next value and its signature, on the upper stage."""
        self.moved = True
        head, *tensors = self._receiver.recv()
        header = head.numpy().tobytes()
        if len(header) > _NUMBER:
            self._known.append(ValueStructure.decoded(header))
            signature = self._known[-1]
        else:
            number = int.from_bytes(header, "little")
            if number >= len(self._known):
                raise self._misplaced(f"signature {number} of {len(self._known)} that are known")
            signature = self._known[number]
        return _value(signature, tensors), signature

    # ---- backward

    def send_gradients(self, grads: list[Tensor | None], like: list[Tensor]) -> None:
        """Start sending the gradients of a value that was received. An absent one is zero.

        Args:
            like: The tensors that carry gradients, in order.
        """
        if like:
            self._start([torch.zeros_like(t) if g is None else g for g, t in zip(grads, like, strict=True)])

    def receive_gradients(self, signature: ValueStructure) -> list[Tensor | None]:
        """Receive the gradients of a value with this signature, which was sent earlier."""
        if not signature.gradients:
            return []
        self.moved = True
        # The upper stage is not there in a rehearsal, and is rehearsed after this one; its gradients look like what was sent.
        gradients = self._from_nobody() if is_rehearsal() else self._receiver.recv()
        if len(gradients) != signature.gradients:
            raise self._misplaced(f"{len(gradients)} gradients of {signature.gradients}")
        return list(gradients)

    # ----

    def _from_nobody(self) -> tuple[Tensor, ...]:
        gradients = self._gradients.popleft()
        for gradient in gradients:
            ds_comm.recv(gradient, group=self._group, group_src=self._peer, unit="pipe")
        return tuple(gradients)

    def _misplaced(self, what: str) -> CommError:
        return CommError(
            f"{self.name}: a message with {what} came",
            code="pipe-link",
            fix="Run the same program on every rank of the pipeline.",
        )

    def _start(self, tensors: list[Tensor]) -> None:
        self.moved = True
        self._sending.append((self._sender.send(tensors), tensors))
        while len(self._sending) > 16:
            self._sending.popleft()[0].wait()

    def flush(self) -> None:
        """Wait until the memory of everything that was sent is free."""
        while self._sending:
            self._sending.popleft()[0].wait()


def _value(signature: ValueStructure, tensors: list[Tensor]) -> Any:
    rest = iter(tensors)
    leaves: list[Any] = []
    for kind, value, *same in signature.leaves:
        if kind == "value":
            leaves.append(value)
        else:
            tensor = next(rest)
            if same:  # a change in place is one of both, as where the stage before was
                tensor = tensors[same[0]].detach()
            leaves.append(tensor.requires_grad_(True) if value and torch.is_grad_enabled() else tensor)
    if signature.tree not in _specs:
        _specs[signature.tree] = treespec_loads(signature.tree)
    return tree_unflatten(leaves, _specs[signature.tree])
