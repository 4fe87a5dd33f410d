"""HTTP server of a model, with the requests and answers of OpenAI's API, on the standard library.

One thread runs the engine, and one per connection waits for its tokens. Beyond the service's limit of requests the
answer is 503. The pages of a client that disconnects are freed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import select
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from gpu_ops.errors import GpuOpsError
from gpu_ops.inference.completions import Answer, Completion, RequestError, completion_of
from gpu_ops.inference.requests import Token
from gpu_ops.inference.service import Reply, Service
from gpu_ops.inference.text_model import TextModel

__all__ = ["Server"]

_MOST_BYTES = 1 << 22  # of a request
_POSTED = ("/v1/completions", "/v1/chat/completions")
_OTHER = {"GET": "POST", "POST": "GET"}
_SECONDS = 60  # that a client may take to read or write


class Server(ThreadingHTTPServer):
    """Server that runs in its own threads; ``close`` ends it and its service.

    Parameters
    ----------
    model : TextModel
    service : Service
        Service whose engine runs the model.
    host, port : str, int
        Address; port 0 takes a free one, which ``server_port`` then holds.
    api_key : str, optional
        Key that requests must have, as ``Authorization: Bearer KEY``.
    log : bool
        Whether a line per request is written to stderr.
    """

    request_queue_size = 256
    daemon_threads = True

    def __init__(
        self,
        model: TextModel,
        service: Service,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        api_key: str | None = None,
        log: bool = False,
    ) -> None:
        self.model, self.service, self.api_key, self.log = model, service, api_key, log
        self.started = int(time.time())
        super().__init__((host, port), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    @property
    def longest(self) -> int:
        """Tokens that a prompt and its text may have."""
        engine = self.service.engine
        cached = engine.cache.stats.total * engine.cache.page_size
        return min(self.model.longest or engine.max_seqlen, engine.max_seqlen, cached)

    def close(self) -> None:
        """End the server; requests that run get an error."""
        self.shutdown()
        self.service.close()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors other than those of a connection that its client has ended."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _SECONDS

    @property
    def _served(self) -> Server:
        return cast(Server, self.server)

    def do_GET(self) -> None:
        self._handled(self._get)

    def do_POST(self) -> None:
        self._handled(self._post)

    def _handled(self, answer: Any) -> None:
        try:
            answer()
        except RequestError as error:
            self._refuse(error)

    def _get(self) -> None:
        self._check_key()
        answers = self._answers()
        self._answer(answers[self._checked_path(answers, _POSTED)])

    def _answers(self) -> dict[str, Any]:
        """Answers to GET by path."""
        served = self._served
        entry = {"id": served.model.name, "object": "model", "created": served.started, "owned_by": "gpu_ops"}
        return {
            "/health": {"status": "ok", "unfinished": served.service.engine.unfinished},
            "/v1/models": {"object": "list", "data": [entry]},
            f"/v1/models/{served.model.name}": entry,
        }

    def _checked_path(self, known: Iterable[str], others: Iterable[str]) -> str:
        """Path of the request, which must be one of ``known``; ``others`` are those of the other method."""
        path = self.path.partition("?")[0].rstrip("/")
        if path in others:
            raise RequestError(
                f"{path} takes {_OTHER[self.command]}, not {self.command}",
                status=HTTPStatus.METHOD_NOT_ALLOWED,
                code="method_not_allowed",
            )
        if path not in known:
            raise RequestError(f"there is no {path}", status=HTTPStatus.NOT_FOUND, code="not_found")
        return path

    def _post(self) -> None:
        body = self._body()  # also of a request that is refused: the connection is used again
        self._check_key()
        path = self._checked_path(_POSTED, self._answers())
        served = self._served
        request = completion_of(body, served.model, served.longest, chat=path.startswith("/v1/chat"))
        with contextlib.ExitStack() as stack:
            replies = []
            for ids, sampling in request.texts():
                try:
                    reply = served.service.submit(
                        ids, max_new_tokens=request.limit_of(ids), sampling=sampling, stop=served.model.ends
                    )
                except GpuOpsError as error:
                    raise RequestError(str(error)) from error
                if reply is None:
                    raise RequestError(
                        f"{served.service.most} requests run or wait; try again later",
                        status=HTTPStatus.SERVICE_UNAVAILABLE,
                        code="overloaded",
                    )
                replies.append(stack.enter_context(reply))  # its pages are freed however this ends
            self._complete(request, replies)

    def _complete(self, request: Completion, replies: list[Reply]) -> None:
        answer = Answer(request, self._served.model)
        try:
            for i, token in self._tokens(replies, answer):
                event = answer.add(i, token)
                if answer.choices[i].finish_reason and not token.finished:  # by a stop string
                    replies[i].cancel()
                if request.stream:
                    self._send_event(event)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # of a pass, or of the service
            failure = RequestError(str(error), status=HTTPStatus.INTERNAL_SERVER_ERROR)
            if not self._streams:
                raise failure from error
            self._send_event({"error": failure.entries()})
            return
        if not request.stream:
            self._answer(answer.whole())
            return
        if request.include_usage:
            self._send_event(answer.usage_event())
        self.wfile.write(b"data: [DONE]\n\n")

    def _tokens(self, replies: list[Reply], answer: Answer) -> Iterator[tuple[int, Token]]:
        """Tokens of all texts as they arrive, with the number of the text, while the client is connected."""
        patience = 0.05 if len(replies) > 1 else 1.0
        while running := [i for i, choice in enumerate(answer.choices) if not choice.finish_reason]:
            for i in running:
                while not answer.choices[i].finish_reason:
                    self._check_connected()
                    token = replies[i].get(timeout=patience if i == running[0] else 0)
                    if token is None:
                        break
                    yield i, token

    def _check_connected(self) -> None:
        ready, _, _ = select.select([self.connection], [], [], 0)
        if ready and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError("the client has disconnected")

    # ---- HTTP ----------------------------------------------------------------------------------------------

    _streams = False

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdecimal() or len(length) > 18:
            self.close_connection = True
            raise RequestError("a request takes a Content-Length", status=HTTPStatus.LENGTH_REQUIRED)
        if int(length) > _MOST_BYTES:
            self.close_connection = True
            raise RequestError(
                f"the body may have up to {_MOST_BYTES} bytes", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            )
        data = self.rfile.read(int(length))
        if len(data) < int(length):
            raise ConnectionAbortedError("the client has disconnected")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON: {error}") from error

    def _check_key(self) -> None:
        key = self._served.api_key
        sent = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if key is not None and not hmac.compare_digest(sent.encode(), key.encode()):
            raise RequestError(
                "the request has not the server's API key",
                status=HTTPStatus.UNAUTHORIZED,
                code="invalid_api_key",
            )

    def _send_event(self, event: Any) -> None:
        if not self._streams:
            self._streams = self.close_connection = True  # the end of the connection is that of the stream
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-cache")
            self.send_header("Connection", "close")
            self.end_headers()
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def _answer(self, body: Any, status: int = HTTPStatus.OK) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Retry-After", "1")
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", _OTHER[self.command])
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, error: RequestError) -> None:
        self._answer({"error": error.entries()}, error.status)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what the standard library refuses, such as an unknown method, in the form of all errors."""
        self.close_connection = True
        self._refuse(RequestError(message or HTTPStatus(code).phrase, status=code))

    def log_message(self, format: str, *args: Any) -> None:
        """Write a line of the standard library, if the server logs."""
        if self._served.log:
            super().log_message(format, *args)
