"""Serve a model over HTTP as ``/v1/completions``, with the standard library alone.

    python scripts/examples/server.py --model FOLDER           then
    curl localhost:8000/v1/completions -d '{"prompt": "Once", "max_tokens": 32, "stream": true}'

One thread runs the engine, and one per connection waits for its tokens. Beyond ``--most`` requests the answer is 503.
A client that goes away gives its pages back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import secrets
import select
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gpu_ops import inference, models, training
from gpu_ops.errors import GpuOpsError
from gpu_ops.inference.command import end_tokens


class Service:
    """An engine in a thread of its own; other threads hand it calls, which it makes between two passes."""

    def __init__(self, engine: inference.Engine, tokenizer: Any, stop: list[int], most: int) -> None:
        self.engine, self.tokenizer, self.stop, self.most = engine, tokenizer, stop, most
        self.calls: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue()
        self.tokens: dict[int, queue.Queue[Any]] = {}
        threading.Thread(target=self._run, daemon=True).start()

    def between_passes(self, function: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self.calls.put((function, future))
        return future.result()

    def submit(self, ids: list[int], **options: Any) -> tuple[int, queue.Queue[Any]] | None:
        """The request's number and the queue of its tokens; None: too many requests are there already."""
        if self.engine.unfinished >= self.most:
            return None
        number = self.engine.submit(ids, stop=self.stop, **options)
        self.tokens[number] = queue.Queue()
        return number, self.tokens[number]

    def cancel(self, number: int) -> None:
        if self.tokens.pop(number, None) is not None:
            self.engine.cancel(number)

    def _run(self) -> None:
        """A queue gets the tokens of its request, or the error of the pass that was to give one."""
        while True:
            while not self.calls.empty() or not self.engine.unfinished:
                function, future = self.calls.get()
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
            try:
                found = self.engine.step()
            except Exception as error:  # of all requests that are there
                for number, tokens in list(self.tokens.items()):
                    self.cancel(number)
                    tokens.put(error)
                continue
            for token in found:
                of = self.tokens.pop(token.request) if token.finished else self.tokens[token.request]
                of.put(token)


MOST_BYTES = 1 << 20  # of a request
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "frequency_penalty", "presence_penalty")


class Handler(BaseHTTPRequestHandler):
    service: Service

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, {"unfinished": self.service.engine.unfinished})

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length", 0))
            if not 0 <= length <= MOST_BYTES:
                raise ValueError(f"the body may have up to {MOST_BYTES} bytes")
            body = json.loads(self.rfile.read(length))
            if not isinstance(body, dict) or not isinstance(body.get("prompt"), str):
                raise ValueError("the body must be an object whose prompt is a text")
            defaults = {"temperature": 1.0, "seed": secrets.randbits(63)}
            given = {**defaults, **{name: body[name] for name in SAMPLING if name in body}}
            stop = body.get("stop") or []
            ids = self.service.tokenizer.encode(body["prompt"]).ids
            stop = [stop] if isinstance(stop, str) else stop
            stream = inference.TextStream(self.service.tokenizer, stop, ids)
            options = {"max_new_tokens": body.get("max_tokens", 16), "sampling": inference.Sampling(**given)}
            submitted = self.service.between_passes(lambda: self.service.submit(ids, **options))
        except (GpuOpsError, ValueError, TypeError, RecursionError) as error:
            return self._answer(400, {"error": str(error)})
        if submitted is None:
            return self._answer(503, {"error": "too many requests are here; try again"})
        try:
            self._complete(submitted[1], stream, bool(body.get("stream")))
        except ConnectionError:
            pass  # the client went away
        finally:  # no more than a look where the request has ended
            self.service.between_passes(lambda: self.service.cancel(submitted[0]))

    def _wait(self, tokens: queue.Queue[Any]) -> Any:
        """The next token, as long as the client is there."""
        while True:
            ready, _, _ = select.select([self.connection], [], [], 0)
            if ready and not self.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionError("the client went away")
            with contextlib.suppress(queue.Empty):
                return tokens.get(timeout=1)

    def _complete(self, tokens: queue.Queue[Any], stream: inference.TextStream, streams: bool) -> None:
        text, count, reason = "", 0, ""
        while not reason:
            token = self._wait(tokens)
            if isinstance(token, Exception):
                if not streams or not count:
                    return self._answer(500, {"error": str(token)})
                event = json.dumps({"error": str(token)})
                self.wfile.write(f"data: {event}\n\n".encode())
                return None
            count, reason = count + 1, token.finished
            piece = "" if reason in ("stop", "error") else stream.add(token.token)
            piece += stream.finish() if reason else ""
            reason = "stop" if stream.stopped else reason
            text += piece
            if streams:
                self._send_piece(piece, reason, first=count == 1)
        if not streams:
            choice = {"index": 0, "text": text, "finish_reason": reason}
            self._answer(200, {"choices": [choice], "usage": {"completion_tokens": count}})

    def _send_piece(self, piece: str, reason: str, *, first: bool) -> None:
        if first:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
        choice = {"index": 0, "text": piece, "finish_reason": reason or None}
        self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n" if reason else b"")

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def serve(service: Service, host: str, port: int) -> ThreadingHTTPServer:
    handler = type("Handler", (Handler,), {"service": service})
    server = type("Server", (ThreadingHTTPServer,), {"request_queue_size": 256})((host, port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--pages", type=int, default=1024, help="of 16 tokens, in the cache")
    parser.add_argument("--kv-dtype", help="of the cache: int8 or float8_e4m3fn take half of bfloat16")
    parser.add_argument("--most", type=int, default=128)
    options = parser.parse_args()
    weights, config = models.load(options.model)
    cache = inference.cache_for(weights, config, num_pages=options.pages, dtype=options.kv_dtype)
    tokenizer = training.load_tokenizer(options.model / "tokenizer.json")
    engine = inference.Engine(weights, config, cache)
    server = serve(
        Service(engine, tokenizer, end_tokens(options.model), options.most), options.host, options.port
    )
    print(f"http://{options.host}:{server.server_port}/v1/completions; Ctrl-C ends it")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.shutdown()


if __name__ == "__main__":
    main()
