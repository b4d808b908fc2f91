"""An HTTP proxy in front of a store that fails as networks do. No pytest here.

A plan says of coming requests, by number, what happens to them: "refused" (the connection is closed before an answer), "slow" (an answer
after a while), "cut" (half of it, then the connection is closed), "short" (fewer bytes than were asked for, in an answer that is in
order), "busy" (503). Requests without a plan go through.
"""

import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KINDS = ("refused", "slow", "cut", "short", "busy")


class FaultProxy:
    """Listens on a loopback port; `plan` maps a request's number, counted from `arm`, to a kind of fault."""

    def __init__(self, host, port):
        proxy, self._lock = self, threading.Lock()
        self.plan, self.count, self.seen, self.delay_s = {}, 0, [], 0.3

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def _pass(self):
                fault = proxy._next(self.command)
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length) if length else self._chunks()
                if fault == "refused":
                    self.close_connection = True
                    return
                if fault == "busy":
                    self._answer(503, [], b"")
                    return
                if fault == "slow":
                    time.sleep(proxy.delay_s)
                link = http.client.HTTPConnection(host, port, timeout=200)
                headers = {
                    k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "content-length")
                }
                try:
                    link.request(
                        self.command, self.path, body=body, headers={**headers, "Content-Length": str(len(body))}
                    )
                    answer = link.getresponse()
                    data = answer.read()
                finally:
                    link.close()
                kept = [
                    (k, v)
                    for k, v in answer.getheaders()
                    if k.lower() not in ("content-length", "transfer-encoding", "connection")
                ]
                if fault == "short" and self.command == "GET" and data:
                    data = data[: len(data) // 2]
                    kept = [(k, v) for k, v in kept if "checksum" not in k.lower()]
                self._answer(answer.status, kept, data, cut=fault == "cut", length=answer.getheader("Content-Length"))

            def _answer(self, status, headers, data, cut=False, length=None):
                self.send_response(status)
                for key, value in headers:
                    self.send_header(key, value)
                # A HEAD has the length of what it does not send.
                self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(data)))
                self.end_headers()
                if cut:
                    self.wfile.write(data[: len(data) // 2])
                    self.wfile.flush()
                    self.close_connection = True
                elif self.command != "HEAD":
                    self.wfile.write(data)

            def _chunks(self):
                if "chunked" not in (self.headers.get("Transfer-Encoding") or ""):
                    return b""
                out = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    out += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return out

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, client_address):
                """A client that went away is no news."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def arm(self, plan):
        """Count from here on, and fail these requests."""
        with self._lock:
            self.plan, self.count, self.seen = dict(plan), 0, []

    def _next(self, command):
        with self._lock:
            fault = self.plan.get(self.count)
            self.count += 1
            if fault:
                self.seen.append(f"{fault} {command}")
            return fault

    def close(self):
        self._server.shutdown()
        self._server.server_close()
