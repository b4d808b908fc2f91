"""A port for rank 0 that nobody else gets: chosen and kept, not chosen and hoped for."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from ds_config.errors import LaunchError

__all__ = ["hold_port"]


@contextlib.contextmanager
def hold_port(port: int = 0) -> Iterator[int]:
    """Keep a TCP port of this host bound, not listening, while inside; 0 lets the kernel choose a free one.

    A bound port is not given to anybody who asks for a free one. Rank 0's store may still bind and listen on it, because
    both sides set SO_REUSEADDR, which Linux allows while at most one of the two listens.

    Raises:
        LaunchError: the port given is in use ("launch-port").
    """
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(_bound(port)).getsockname()[1]


def _bound(port: int) -> socket.socket:
    # Both families, as torch's store listens; hosts without IPv6 take IPv4.
    dual = socket.has_dualstack_ipv6()
    holder = socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind(("::" if dual else "0.0.0.0", port))
    except OSError as error:
        holder.close()
        raise LaunchError(
            f"port {port} of this host cannot be used for rank 0: {error.strerror}",
            code="launch-port",
            fix="Leave --master-port out (one host: a free one is chosen), or give another.",
        ) from error
    return holder
