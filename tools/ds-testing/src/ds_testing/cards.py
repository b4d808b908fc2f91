"""Worlds on cards: which ranks share one, what NCCL is told then, and what it answers.

NCCL refuses two ranks on one device of a host. Ranks that call themselves other hosts (`NCCL_HOSTID`), without peer access and shared memory,
over loopback sockets, are accepted; whether that holds here is asked once for each number of ranks, in processes of their own. Pure but for
`ask_nccl` and `count_cards`; importing this file imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["NO_CARD", "CardBook", "NcclAnswer", "ask_nccl", "card_of", "card_variables", "count_cards", "read_answers"]

NO_CARD = "device world: torch finds no CUDA device"
"""Why a test is skipped."""

_ASK_S = 180.0
_PROBE = (sys.executable, "-m", "ds_testing.nccl_probe")


@dataclass(frozen=True, slots=True)
class NcclAnswer:
    """Whether NCCL sums over so many ranks on the cards of this machine, and what it answered.

    Attributes:
        text: The version where it works, the error of the first rank that failed where it does not.
    """

    works: bool
    text: str

    @property
    def backend(self) -> str:
        """The backend of a world: gloo carries tensors of the card through host memory where NCCL does not."""
        return "cpu:gloo,cuda:nccl" if self.works else "cpu:gloo,cuda:gloo"


def card_of(rank: int, size: int, cards: int) -> int:
    """Return the card of `rank`: one each where there are enough, else all ranks on the first."""
    return rank if cards >= size else 0


def card_variables(rank: int, size: int, cards: int) -> dict[str, str]:
    """Return the environment of `rank` in a world of `size` on `cards` cards; empty on the CPU (0 cards).

    Ranks that share a card look like hosts of one rank each.
    """
    if cards < 1:
        return {}
    variables = {"NCCL_SOCKET_IFNAME": "lo", "LOCAL_RANK": str(card_of(rank, size, cards))}
    if cards >= size:
        return variables
    return variables | {
        "LOCAL_WORLD_SIZE": "1",
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
    }


def count_cards() -> int:
    """Count the CUDA devices that torch finds."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def ask_nccl(size: int, cards: int, probe: Sequence[str] = _PROBE, limit_s: float = _ASK_S) -> NcclAnswer:
    """Sum one number over `size` processes, and return how that ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [*probe],
            env=os.environ | _probe_variables(rank, size, port) | card_variables(rank, size, cards),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    said: list[str] = []
    for process in started:
        try:
            said.append(process.communicate(timeout=limit_s)[0])
        except subprocess.TimeoutExpired:
            process.kill()
            said.append(process.communicate()[0] + f"\nno answer in {limit_s:g} s")
            limit_s = min(limit_s, 5.0)  # the others wait for the same
    return read_answers(said)


def _probe_variables(rank: int, size: int, port: int) -> dict[str, str]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "NCCL_DEBUG": "WARN", **address}


def read_answers(said: Sequence[str]) -> NcclAnswer:
    """Return the common answer of the ranks, whose last line is JSON with `version` where the sum was right."""
    versions = []
    for text in said:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        try:
            versions.append(str(json.loads(lines[-1])["version"]))
        except (IndexError, ValueError, KeyError, TypeError):
            warnings = [line for line in lines if "NCCL WARN" in line]
            return NcclAnswer(False, (warnings or lines or ["it said nothing"])[-1][:300])
    return NcclAnswer(True, f"NCCL {versions[0]}")


class CardBook:
    """What is known of this machine's cards in one pytest run; asks once."""

    def __init__(self) -> None:
        self._cards: int | None = None
        self.answers: dict[int, NcclAnswer] = {}

    @property
    def cards(self) -> int:
        if self._cards is None:
            self._cards = count_cards()
        return self._cards

    def answer(self, size: int) -> NcclAnswer:
        """Return NCCL's answer for a world of `size` ranks."""
        if size not in self.answers:
            self.answers[size] = ask_nccl(size, self.cards)
        return self.answers[size]

    def facts(self) -> Mapping[str, str]:
        """Return the name of the first card, and the versions of what drives it; empty without one."""
        if not self.cards:
            return {}
        import torch

        return {"card": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
