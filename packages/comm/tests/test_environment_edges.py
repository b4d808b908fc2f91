"""Values of environment variables that nobody meant: an error of ours before torch is asked."""

from __future__ import annotations

import itertools
import socket
from types import SimpleNamespace

import pytest

from ds_comm import store_rendezvous
from ds_comm.backend import choose_backend
from ds_comm.launch import read_launch
from ds_comm.watch.recorder import deadline_from
from ds_config.errors import CommError

RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("MASTER_PORT", "99999"), ("MASTER_PORT", "9" * 5000), ("RANK", "\u00b2"), ("WORLD_SIZE", "9" * 5000)],
)
def test_numbers_that_cannot_be(name: str, value: str) -> None:
    with pytest.raises(CommError) as caught:
        read_launch(RANK | {name: value})
    assert caught.value.code == "comm-env"


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", "1 minute"])
def test_a_deadline_that_is_none(value: str) -> None:
    with pytest.raises(CommError) as caught:
        deadline_from(value)
    assert caught.value.code == "comm-env"


@pytest.mark.parametrize("value", ["carrier-pigeon", "cpu:gloo,cuda:pigeon", ","])
def test_a_backend_that_this_torch_does_not_know(value: str) -> None:
    launch = read_launch(RANK)
    assert launch is not None
    with pytest.raises(CommError) as caught:
        choose_backend(None, {"DS_COMM_BACKEND": value}, launch, ("cpu", "gloo"))
    assert caught.value.code == "comm-env"
    assert choose_backend(None, {"DS_COMM_BACKEND": "cpu:gloo"}, launch, ("cpu", "gloo")).name == "cpu:gloo"


def test_a_host_that_nobody_knows_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each look moves: a resolver on the network may think longer about one lookup than the limit here."""

    def unknown(name: str, port: None) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    clock = itertools.count(0.0, 0.25)
    monkeypatch.setattr(store_rendezvous, "socket", SimpleNamespace(getaddrinfo=unknown))
    monkeypatch.setattr(
        store_rendezvous, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None)
    )
    with pytest.raises(TimeoutError, match=r"nowhere\.invalid"):
        store_rendezvous._await_name("nowhere.invalid", 1.5)
    assert caplog.text.count("nowhere.invalid") == 1


def test_an_address_needs_no_lookup() -> None:
    store_rendezvous._await_name("127.0.0.1", 1.0)
