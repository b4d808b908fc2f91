"""Who may ask a server: requests with its key, for a name that it answers to."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Collection

from fastapi import Response

from ds_inference.serve.body import Receive, Scope, Send

__all__ = ["AccessControl"]

_OPEN = ("/health",)
"""Paths that probes of a supervisor read, without a key."""


class AccessControl:
    """ASGI middleware that refuses requests without the server's key, and those for another host's name.

    A page in a browser can ask a server on loopback by a name of its own that leads there; the name in `Host` tells.

    Args:
        api_key: What `Authorization: Bearer` has to say; empty: nobody is asked for it.
        hosts: Names in `Host` that are served; empty: all.
        refuse: Makes the answer of a status and a sentence.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        api_key: str,
        hosts: Collection[str],
        refuse: Callable[[int, str], Response],
    ) -> None:
        self._app, self._api_key, self._hosts, self._refuse = app, api_key.encode(), frozenset(hosts), refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        refused = self._refusal(scope) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = dict(scope["headers"])
        host = _name(headers.get(b"host", b"").decode("latin-1"))
        if self._hosts and host not in self._hosts:
            return self._refuse(403, f"this server does not answer to {host[:200]!r}; --allowed-host NAME adds a name")
        if not self._api_key or scope["path"] in _OPEN:
            return None
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._api_key):
            return None
        return self._refuse(401, "this server asks for its API key: send `Authorization: Bearer KEY`")


def _name(host: str) -> str:
    """Return the name in `name:port`, or the address in `[address]:port`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
