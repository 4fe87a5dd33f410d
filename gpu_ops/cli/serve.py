"""Command ``gpu-ops serve``: a model over HTTP, until an interrupt."""

from __future__ import annotations

import argparse
import threading

from gpu_ops.cli.generate import open_with
from gpu_ops.cli.terminal import make_console
from gpu_ops.core.checks import integer
from gpu_ops.errors import OptionError
from gpu_ops.inference.engine import Engine
from gpu_ops.inference.forward import cache_for
from gpu_ops.inference.server import Server
from gpu_ops.inference.service import Service

__all__ = ["run"]

_PAGE = 16  # tokens


def run(options: argparse.Namespace) -> int:
    """Serve until an interrupt."""
    console, port = make_console(), integer("serve", "--port", options.port, low=0, high=65535)
    console.print(f"loading {options.model}", markup=False, highlight=False)
    model = open_with(options, chat=True)
    model.name = options.name or model.name
    pages = -(-options.cache_tokens // _PAGE)
    cache = cache_for(model.weights, model.config, num_pages=pages, page_size=_PAGE, dtype=options.kv_dtype)
    service = Service(Engine(model.weights, model.config, cache), most=options.max_requests)
    try:
        server = Server(model, service, options.host, port, api_key=options.api_key, log=options.log)
    except OSError as error:
        service.close()
        raise OptionError(f"{options.host}:{port} cannot be served: {error.strerror or error}") from error
    chats = "/v1/chat/completions, " if model.template else ""
    console.print(
        f"serving {model.name} at http://{options.host}:{server.server_port}\n"
        f"/v1/completions, {chats}/v1/models, /health; {server.longest} tokens a request, "
        f"{pages * _PAGE} in the cache; Ctrl-C ends it",
        markup=False,
        highlight=False,
    )
    console.file.flush()
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        console.print("stopped", markup=False)
    finally:
        server.close()
    return 0
