"""The hosts of a job tell each other that they live, and why they end: so that none goes on alone.

A connection that is cut says nothing for hours, and a batch system or ssh may not notice, so the keepers do it themselves. Words: the
*centre* is the keeper of node 0, which every host can reach because rank 0 is there; *members* are the other nodes by number, and
`ds run` that started them (LAUNCHER). A member sends a datagram to the centre, which answers: UDP, on the number of rank 0's port, which
TCP leaves free. Who was heard once and then not for `lost_after_s` is lost, on both sides. Who was never heard is not missed: a firewall
may be between. A member that fails says so and the centre passes it on, so no host waits for the deadline where the network is whole.
Signs of life carry the versions of Python and torch, so hosts that differ are named at once. Each datagram carries a keyed digest, since one can end a job.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ds_launcher.launch_plan import HostWatch

__all__ = [
    "CENTRE",
    "LAUNCHER",
    "Heartbeat",
    "HeartbeatSocket",
    "Heartbeats",
    "JobEnd",
    "decode_message",
    "encode_message",
]

CENTRE, LAUNCHER = 0, -1
_DIGEST_BYTES = 16
_REPEATS = 3  # of what is said once: a datagram may be lost
_LEAST_PERIOD_S, _PARTS = 0.2, 5


@dataclass(frozen=True, slots=True)
class JobEnd:
    """Why a job ends, as its first host to know says it.

    Attributes:
        host: which failed; empty: none of them (a signal).
        text: one line.
        status: exit status.
    """

    host: str
    text: str
    status: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One datagram: a sign of life, with `job_end` a failure, with `bye` the last one of a member."""

    member: int
    job_end: JobEnd | None = None
    bye: bool = False
    about: str = ""


def encode_message(message: Heartbeat, key: str) -> bytes:
    """Encode a message as its digest followed by JSON."""
    job_end = message.job_end
    words = [job_end.host, job_end.text[:800], job_end.status] if job_end else None
    body = json.dumps({"from": message.member, "told": words, "bye": message.bye, "about": message.about}).encode()
    return _digest(body, key) + body


def decode_message(data: bytes, key: str) -> Heartbeat | None:
    """Decode a message that `encode_message` made with this key; return None for anything else."""
    digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if not hmac.compare_digest(digest, _digest(body, key)):
        return None
    fields = json.loads(body)
    return Heartbeat(
        fields["from"], JobEnd(*fields["told"]) if fields["told"] else None, fields["bye"], fields["about"]
    )


def _digest(body: bytes, key: str) -> bytes:
    return hmac.new(key.encode(), body, hashlib.sha256).digest()[:_DIGEST_BYTES]


class Heartbeats:
    """Who was heard when. Pure: the caller brings the time."""

    def __init__(self, watch: HostWatch) -> None:
        self._watch = watch
        self._heard_s: dict[int, float] = {}
        self._sent_s = float("-inf")

    @property
    def period_s(self) -> float:
        """How often a member speaks: often until the centre has answered once, since hosts do not start at the same time."""
        return max(_LEAST_PERIOD_S, self._watch.lost_after_s / _PARTS if self._heard_s else 0.0)

    def due(self, now_s: float) -> bool:
        """Whether a member has to speak now; then it has."""
        if self._watch.member == CENTRE or now_s - self._sent_s < self.period_s:
            return False
        self._sent_s = now_s
        return True

    def heard(self, message: Heartbeat, now_s: float) -> None:
        """Record a sign of life of the sender; after a bye, expect no more."""
        if message.bye:
            self._heard_s.pop(message.member, None)
        else:
            self._heard_s[message.member] = now_s

    def lost(self, now_s: float) -> JobEnd | None:
        """Return the end of the job because of the longest silent member; None while nobody timed out."""
        member = min(self._heard_s, key=self._heard_s.__getitem__, default=None)
        if member is None or now_s - self._heard_s[member] <= self._watch.lost_after_s:
            return None
        del self._heard_s[member]
        name = "" if member == LAUNCHER else self._watch.names[member]
        who = f"host {name}" if name else "the host of `ds run`"
        here = "" if self._watch.member == LAUNCHER else f" on host {self._watch.names[self._watch.member]}"
        silent = f"{self._watch.lost_after_s:g} s"
        return JobEnd(name, f"{who} was lost: nothing heard from it for {silent}{here} (--host-timeout)", 1)


class HeartbeatSocket:
    """The socket of one keeper.

    Raises:
        OSError: the port is in use, or the centre's name means nothing here.
    """

    def __init__(self, watch: HostWatch) -> None:
        self.beats, self._watch = Heartbeats(watch), watch
        self._centre: tuple[object, ...]
        family, _, _, _, self._centre = socket.getaddrinfo(watch.address, watch.port, type=socket.SOCK_DGRAM)[0]
        self.socket = socket.socket(family, socket.SOCK_DGRAM)
        if watch.member == CENTRE:
            self.socket.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", watch.port))
        self.socket.setblocking(False)
        self._members: dict[int, tuple[object, ...]] = {}  # where they speak from; the centre's to know

    def speak(self, now_s: float) -> None:
        """Send a sign of life when it is time."""
        if self.beats.due(now_s):
            self._send(Heartbeat(self._watch.member, about=self._watch.about), {CENTRE: self._centre})

    def listen(self, now_s: float) -> list[Heartbeat]:
        """Take what came; return those that tell something."""
        notices = []
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data, sender = self.socket.recvfrom(4096)
                except ConnectionError:  # a port that nobody listens on: the centre has not started, or has ended
                    continue
                message = decode_message(data, self._watch.key)
                if message is None or (message.member == CENTRE) == (self._watch.member == CENTRE):
                    continue
                self.beats.heard(message, now_s)
                if self._watch.member == CENTRE:
                    self._members[message.member] = sender
                    if message.job_end is None and not message.bye:
                        self._send(Heartbeat(CENTRE), {message.member: sender})
                if (unlike := _unlike(self._watch, message)) is not None:
                    message = Heartbeat(message.member, unlike)
                if message.job_end is not None:
                    notices.append(message)
        return notices

    def tell(self, message: Heartbeat) -> None:
        """Send a final message: to the centre, or from the centre to all members."""
        for _ in range(_REPEATS):
            self._send(message, self._members if self._watch.member == CENTRE else {CENTRE: self._centre})

    def _send(self, message: Heartbeat, to: Mapping[int, tuple[object, ...]]) -> None:
        data = encode_message(message, self._watch.key)
        for address in to.values():
            with contextlib.suppress(OSError):  # no network just now: that is what silence is for
                self.socket.sendto(data, address)


def _unlike(watch: HostWatch, message: Heartbeat) -> JobEnd | None:
    """Return the end of the job because a host has other versions than node 0; None if they agree.

    Checked before ranks wait for each other, or rely on what their versions do not share.
    """
    if watch.member != CENTRE or not (watch.about and message.about) or message.about == watch.about:
        return None
    host, first = watch.names[message.member], watch.names[CENTRE]
    return JobEnd(host, f"host {host} has {message.about}; host {first} has {watch.about}: install the same on both", 1)
