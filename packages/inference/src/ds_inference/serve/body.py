"""Bodies of requests are read whole before anybody parses them, and only up to a size, from clients that go on sending."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import Response

__all__ = ["BodyLimit", "Message", "Receive", "Scope", "Send"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class BodyLimit:
    """Answers in the application's place where a body is too large; what a client says of its length is believed if it is too large.

    Args:
        most: Bytes.
        stall: Seconds until the next piece of a body.
        refuse: Makes the answer of a status and a sentence.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        most: int,
        stall: float,
        refuse: Callable[[int, str], Response],
    ) -> None:
        self._app, self._most, self._stall, self._refuse = app, most, stall, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        messages: list[Message] = []
        promised, size = int(said) if said.isdigit() and len(said) < 20 else 0, 0
        more = promised <= self._most
        while more:
            try:
                async with asyncio.timeout(self._stall):
                    messages.append(await receive())
            except TimeoutError:
                refused = self._refuse(408, f"no more of the body came for {self._stall:g} s, after {size} bytes")
                await refused(scope, receive, send)
                return
            size += len(messages[-1].get("body", b""))
            more = messages[-1].get("more_body", False) and size <= self._most
        if max(promised, size) > self._most:
            await self._refuse(413, f"a request may have {self._most} bytes")(scope, receive, send)
            return
        messages.reverse()

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)
