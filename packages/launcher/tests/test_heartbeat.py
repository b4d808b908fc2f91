"""Who is lost, and what is told: without a clock, then over real sockets of this host."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ds_launcher.heartbeat import (
    CENTRE,
    LAUNCHER,
    Heartbeat,
    Heartbeats,
    HeartbeatSocket,
    JobEnd,
    decode_message,
    encode_message,
)
from ds_launcher.launch_plan import HostWatch, LaunchPlan, from_json, to_json

NAMES = ("alpha", "beta", "gamma")


def watch(member: int, port: int = 29500, key: str = "k") -> HostWatch:
    return HostWatch(member, NAMES, "127.0.0.1", port, key, 3.0)


def test_who_was_never_heard_is_not_missed() -> None:
    assert Heartbeats(watch(CENTRE)).lost(1e9) is None


def test_silence_is_named_once() -> None:
    beats = Heartbeats(watch(CENTRE))
    beats.heard(Heartbeat(1), 0.0)
    beats.heard(Heartbeat(2), 2.0)
    assert beats.lost(3.0) is None
    told = beats.lost(3.1)
    assert told is not None
    assert (told.host, told.status) == ("beta", 1)
    assert "beta was lost" in told.text
    assert "alpha" in told.text
    assert beats.lost(3.1) is None


def test_the_launcher_is_no_host() -> None:
    beats = Heartbeats(watch(CENTRE))
    beats.heard(Heartbeat(LAUNCHER), 0.0)
    told = beats.lost(4.0)
    assert told is not None
    assert told.host == ""
    assert "`ds run`" in told.text


def test_a_bye_ends_the_wait() -> None:
    beats = Heartbeats(watch(1))
    beats.heard(Heartbeat(CENTRE), 0.0)
    beats.heard(Heartbeat(CENTRE, bye=True), 1.0)
    assert beats.lost(1e9) is None


def test_members_speak_often_until_they_are_heard() -> None:
    beats = Heartbeats(watch(1))
    assert [beats.due(tenths / 10) for tenths in range(5)] == [True, False, True, False, True]
    beats.heard(Heartbeat(CENTRE), 0.4)
    assert [beats.due(tenths / 10) for tenths in range(5, 11)] == [False] * 5 + [True]
    assert not Heartbeats(watch(CENTRE)).due(0.0)  # which answers only


@given(st.integers(-1, 9), st.text(max_size=900), st.integers(0, 255), st.booleans(), st.text(min_size=1), st.text())
def test_only_who_has_the_key_is_understood(
    member: int, text: str, status: int, bye: bool, key: str, other: str
) -> None:
    message = Heartbeat(member, JobEnd("beta", text[:800], status), bye)
    data = encode_message(message, key)
    assert decode_message(data, key) == message
    if other.encode().rstrip(b"\0") != key.encode().rstrip(b"\0"):  # HMAC pads keys with zeros
        assert decode_message(data, other) is None
    assert decode_message(data[:-1], key) is None


def test_a_failure_reaches_all_through_the_centre() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    centre, beta, launcher = (HeartbeatSocket(watch(member, port)) for member in (CENTRE, 1, LAUNCHER))
    lines = (centre, beta, launcher)
    told = JobEnd("beta", "rank 1 on host beta failed first", 7)
    try:
        for turn in (1.0, 2.0):
            for line in lines:
                line.speak(turn)
            time.sleep(0.02)
            for line in lines:
                assert line.listen(turn) == []
        time.sleep(0.02)
        beta.listen(3.0)
        assert beta.beats.lost(9.0) is not None  # the centre had answered
        beta.tell(Heartbeat(1, told))
        time.sleep(0.02)
        assert {message.job_end for message in centre.listen(3.0)} == {told}
        centre.tell(Heartbeat(CENTRE, told))
        time.sleep(0.02)
        assert {message.job_end for message in launcher.listen(3.0)} == {told}
    finally:
        for line in lines:
            line.socket.close()


def test_hosts_with_other_versions_are_named() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    centre = HeartbeatSocket(replace(watch(CENTRE, port), about="torch 2.13"))
    others = [
        HeartbeatSocket(replace(watch(member, port), about=about))
        for member, about in ((1, "torch 2.13"), (2, "torch 2.12"))
    ]
    try:
        for line in others:
            line.speak(1.0)
        time.sleep(0.02)
        (message,) = centre.listen(1.0)
        assert message.job_end is not None
        assert message.job_end.host == "gamma"
        assert "host gamma has torch 2.12; host alpha has torch 2.13" in message.job_end.text
    finally:
        for line in (centre, *others):
            line.socket.close()


def test_a_launch_carries_its_watch() -> None:
    launch = LaunchPlan((), watch=watch(1))
    assert from_json(to_json(launch)) == launch
