"""Who is still in a job whose hosts come and go: each agent counts up in the store of the rendezvous, and reads how far the others are.

torch's agent starts the ranks anew when a host wants to join, or when one of its own ranks fails. A host that falls silent (power, network)
does neither: its ranks are waited for. So the handler that the agent asks whether somebody waits at the rendezvous also says yes when
somebody is lost, and the hosts that are left meet again without it.

Words: a *round* is one meeting of the hosts, and the ranks that run until the next one; a *beat* is a count in the store. Who was not seen
to beat for `lost_after_s` is lost. A host to which the store does not answer for so long leaves: the others have lost it by then.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["AGAIN", "DONE", "LEFT", "HostBeats", "Pulse", "Round", "Store", "WatchedRendezvous"]

_PARTS, _LEAST_PERIOD_S = 5, 0.2
_WORD = 10**12  # beats are fewer
DONE, AGAIN, LEFT = 1, 2, 3
"""What a host says last in a round: its ranks have ended well; it goes to the next meeting; it leaves the job."""
_ROUND, _NAME = "ds/round", "ds/name/{}"


class Store(Protocol):
    """What is used of torch's stores. `add` answers with the sum, and makes what is not there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add `amount` to the number at `key` and return the sum."""

    def set(self, key: str, value: str, /) -> None:
        """Write."""

    def get(self, key: str, /) -> bytes:
        """Read; waits until it is there."""


@dataclass(frozen=True, slots=True)
class Round:
    """One meeting, as one of its hosts sees it. `names` by number; `token` is no other round's."""

    token: str
    index: int
    names: tuple[str, ...]


class Pulse:
    """Who of a round was seen to beat when. Pure: the caller brings counts and times."""

    def __init__(self, meeting: Round, lost_after_s: float, now_s: float) -> None:
        self._names, self._lost_after_s = meeting.names, lost_after_s
        self._seen_s = {number: now_s for number in range(len(meeting.names)) if number != meeting.index}
        self._counts: dict[int, int] = {}

    @property
    def watched(self) -> tuple[int, ...]:
        """Whose beats are still to be read."""
        return tuple(self._seen_s)

    def observe(self, number: int, count: int, now_s: float) -> str:
        """Record a count that was read from a host; return a line if the host has left the job, else nothing.

        A host that announces that it leaves counts as gone at once.
        """
        word = count // _WORD
        if word:
            self._seen_s.pop(number, None)
            return f"host {self._names[number]} left the job; the others go on without it" if word == LEFT else ""
        if count != self._counts.get(number):
            self._counts[number] = count
            self._seen_s[number] = now_s
        return ""

    def lost(self, now_s: float) -> list[str]:
        """Return a line for each host that was silent for too long, once per host.

        Call this after reading: a count that could not be read says nothing about its host.
        """
        silent = [number for number, seen_s in self._seen_s.items() if now_s - seen_s > self._lost_after_s]
        for number in silent:
            del self._seen_s[number]
        after = f"nothing heard from it for {self._lost_after_s:g} s (--host-timeout)"
        return [f"host {self._names[number]} was lost: {after}; the others go on without it" for number in silent]


class HostBeats:
    """The beats of this host in one round, from threads of its own: any call to a store may take as long as a network is down.

    Args:
        open_store: a connection of this line alone; on a shared one a barrier of the agent would hold the beats up.
        say: tells a line to whoever reads the log.
        cut_off: called once, when the store has not answered for `lost_after_s`.
    """

    def __init__(
        self,
        meeting: Round,
        lost_after_s: float,
        open_store: Callable[[], Store],
        say: Callable[[str], None],
        cut_off: Callable[[], None],
    ) -> None:
        self._meeting, self._lost_after_s, self._say, self._cut_off = meeting, lost_after_s, say, cut_off
        self._open = open_store
        self._period_s = max(_LEAST_PERIOD_S, lost_after_s / _PARTS)
        self._pulse = Pulse(meeting, lost_after_s, time.monotonic())
        self._answered_s = time.monotonic()
        self._word = 0
        self._end, self._announced = threading.Event(), threading.Event()
        self.gone: list[str] = []
        """A line for each host that this round lost."""
        for work in (self._beat, self._judge):
            threading.Thread(target=work, name=f"ds-{work.__name__}", daemon=True).start()

    def close(self, word: int) -> None:
        """Publish DONE, AGAIN or LEFT, waiting no longer than two beats, and stop."""
        self._word = word
        self._end.set()
        self._announced.wait(2 * self._period_s)

    def _beat(self) -> None:
        store: Store | None = None
        while not self._announced.is_set():
            ends = self._end.is_set()
            try:
                store = self._open() if store is None else store
                store.add(self._key(self._meeting.index), self._word * _WORD if ends else 1)
                if not ends:
                    self._read(store)
                self._answered_s = time.monotonic()
            except Exception:  # of whatever kind: it is the silence that counts, and `_judge` does
                store = None
            if ends:
                self._announced.set()
            self._end.wait(self._period_s)

    def _read(self, store: Store) -> None:
        for number in self._pulse.watched:
            if line := self._pulse.observe(number, store.add(self._key(number), 0), time.monotonic()):
                self._lose(line)
        for line in self._pulse.lost(time.monotonic()):
            self._lose(line)

    def _judge(self) -> None:
        while not self._end.wait(self._period_s / 2):
            if time.monotonic() - self._answered_s > self._lost_after_s:
                self._end.set()
                self._cut_off()

    def _lose(self, line: str) -> None:
        self.gone.append(line)
        self._say(line)

    def _key(self, number: int) -> str:
        return f"ds/beat/{self._meeting.token}/{number}"


class WatchedRendezvous:
    """A handler of torch's rendezvous that also says when a host is lost. What it does not say itself is the inner handler's.

    Args:
        inner: a `torch.distributed.elastic.rendezvous.RendezvousHandler`.
        backend: the name it was asked for by.
        line: makes the `HostBeats` of a round; None: nobody is watched.
    """

    def __init__(self, inner: Any, backend: str, line: Callable[[Round], HostBeats | None]) -> None:
        self._inner, self._backend, self._make_line = inner, backend, line
        self._line: HostBeats | None = None
        self._broken = False  # a host was lost before the round had begun

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous handler."""
        return self._backend

    def next_rendezvous(self) -> Any:
        """Join the next rendezvous, and watch the hosts that joined."""
        self.close(AGAIN)
        info = self._inner.next_rendezvous()
        try:
            met = _introduce(info.store, info.rank, info.world_size)
        except Exception:  # a host was lost between meeting and telling its name
            self._broken = True
        else:
            self._broken = False
            self._line = self._make_line(met) if info.world_size > 1 else None
        return info

    def num_nodes_waiting(self) -> int:
        """Count the hosts that want to join or were lost: with any, the agent restarts its ranks."""
        lost = len(self._line.gone) if self._line is not None else 0
        return int(self._inner.num_nodes_waiting()) + lost + self._broken

    def shutdown(self) -> bool:
        """Announce that the job is done on this host, and shut the inner handler down."""
        self.close(DONE)
        return bool(self._inner.shutdown())

    def close(self, word: int) -> None:
        """End the watch over this round, if there is one."""
        line, self._line = self._line, None
        if line is not None:
            line.close(word)


def _introduce(store: Store, rank: int, hosts: int) -> Round:
    """Tell the others of a round who this is, and learn who they are."""
    store.set(_NAME.format(rank), socket.gethostname())
    if rank == 0:
        store.set(_ROUND, uuid.uuid4().hex)
    names = tuple(store.get(_NAME.format(number)).decode() for number in range(hosts))
    return Round(store.get(_ROUND).decode(), rank, names)
