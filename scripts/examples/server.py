"""Serve a model over HTTP as ``/v1/completions``, with only the standard library.

    python scripts/examples/server.py --model FOLDER           then
    curl localhost:8000/v1/completions -d '{"prompt": "Once", "max_tokens": 32, "stream": true}'

One thread runs the engine, and one per connection waits for its tokens. Beyond ``--most`` requests the answer is 503.
The pages of a client that disconnects are freed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import select
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gpu_ops import inference, models, training
from gpu_ops.errors import GpuOpsError
from gpu_ops.inference.command import end_tokens

MOST_BYTES = 1 << 20  # of a request
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "frequency_penalty", "presence_penalty")


class Handler(BaseHTTPRequestHandler):
    service: inference.Service
    tokenizer: Any
    end: list[int]  # tokens that end a text

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
            values = {**defaults, **{name: body[name] for name in SAMPLING if name in body}}
            stop = body.get("stop") or []
            ids = self.tokenizer.encode(body["prompt"]).ids
            stream = inference.TextStream(self.tokenizer, [stop] if isinstance(stop, str) else stop, ids)
            options = {"max_new_tokens": body.get("max_tokens", 16), "sampling": inference.Sampling(**values)}
            reply = self.service.submit(ids, stop=self.end, **options)
        except (GpuOpsError, ValueError, TypeError, RecursionError) as error:
            return self._answer(400, {"error": str(error)})
        if reply is None:
            return self._answer(503, {"error": "too many requests are here; try again"})
        with contextlib.suppress(ConnectionError), reply:  # the client disconnected; its pages are freed
            self._complete(reply, stream, bool(body.get("stream")))

    def _next(self, reply: inference.Reply) -> inference.Token:
        """Next token, while the client is connected."""
        while True:
            ready, _, _ = select.select([self.connection], [], [], 0)
            if ready and not self.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionError("the client went away")
            if token := reply.get(timeout=1):
                return token

    def _complete(self, reply: inference.Reply, stream: inference.TextStream, streams: bool) -> None:
        text, count, reason = "", 0, ""
        while not reason:
            try:
                token = self._next(reply)
            except ConnectionError:
                raise
            except Exception as error:  # of a pass
                if not streams or not count:
                    return self._answer(500, {"error": str(error)})
                event = json.dumps({"error": str(error)})
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


def serve(
    service: inference.Service, tokenizer: Any, end: list[int], host: str, port: int
) -> ThreadingHTTPServer:
    handler = type("Handler", (Handler,), {"service": service, "tokenizer": tokenizer, "end": end})
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
    service = inference.Service(inference.Engine(weights, config, cache), most=options.most)
    server = serve(service, tokenizer, end_tokens(options.model), options.host, options.port)
    print(f"http://{options.host}:{server.server_port}/v1/completions; Ctrl-C ends it")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.shutdown()


if __name__ == "__main__":
    main()
