"""Engine in a separate thread, for programs with a thread for each client."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Self

from gpu_ops.core import checks
from gpu_ops.errors import StateError
from gpu_ops.inference.engine import Engine
from gpu_ops.inference.requests import Token

__all__ = ["Reply", "Service"]


class Reply:
    """Tokens of one request of a :class:`Service`. As a context manager it cancels the rest at its end."""

    def __init__(self, service: Service, number: int) -> None:
        self.number = number
        self._service = service
        self._tokens, self._ended = deque[Token | Exception](), False
        self._changed = threading.Condition()

    def get(self, timeout: float | None = None) -> Token | None:
        """Return the next token; None if none arrives within ``timeout`` seconds, or if there are no more.

        An error of the pass is raised here after the tokens before it, in this call and all later ones.
        """
        if timeout is not None:
            timeout = min(checks.number("Reply.get", "timeout", timeout, low=0), threading.TIMEOUT_MAX)
        with self._changed:
            self._changed.wait_for(lambda: self._tokens or self._ended, timeout)
            if not self._tokens:
                return None
            first = self._tokens[0]
            if isinstance(first, Exception):
                raise first
            self._tokens.popleft()
            return first

    def __iter__(self) -> Iterator[Token]:
        while (token := self.get()) is not None:
            yield token

    def cancel(self) -> None:
        """Return the request's pages, and end the loops over its tokens; do nothing if it has ended."""
        if self._ended:
            return
        with contextlib.suppress(StateError):  # closed: all requests have ended
            self._service.between_passes(lambda: self._service._cancel(self.number))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()

    def _put(self, *found: Token | Exception, last: bool) -> None:
        with self._changed:
            self._tokens.extend(found)
            self._ended |= last
            self._changed.notify_all()


class Service:
    """Thread that runs an :class:`Engine`; the methods may be called from any other thread.

    Parameters
    ----------
    engine : Engine
        Engine that from now on only this service and functions passed to :meth:`between_passes` may call. Requests
        from elsewhere also run; their tokens are dropped.
    most : int
        Limit of requests at a time, running and waiting.

    Examples
    --------
    >>> from gpu_ops import inference, models
    >>> config = models.LlamaConfig(vocab=256, hidden=64, ffn=176, nlayers=2, nheads=4, nheads_kv=2)
    >>> weights = models.Llama.of(models.initial_weights(config), config)
    >>> engine = inference.Engine(weights, config, inference.cache_for(weights, config, num_pages=16))
    >>> with inference.Service(engine) as service, service.submit([1, 2, 3], max_new_tokens=4) as reply:
    ...     [token.finished for token in reply]
    ['', '', '', 'length']
    """

    def __init__(self, engine: Engine, *, most: int = 128) -> None:
        self.engine = engine
        self.most = checks.integer("Service", "most", most, low=0)
        self._calls: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue()
        self._replies: dict[int, Reply] = {}
        self._open, self._lock = True, threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def between_passes(self, function: Callable[[], Any]) -> Any:
        """Return the result of ``function()``, which the engine's thread calls between two passes.

        The function may call the engine and this service.
        """
        if threading.current_thread() is self._thread:
            self._check_open()
            return function()
        future: Future[Any] = Future()
        with self._lock:
            self._check_open()
            self._calls.put((function, future))
        return future.result()

    def submit(self, ids: Sequence[int], **options: Any) -> Reply | None:
        """Submit a request, with the options of :meth:`Engine.submit`; return None if the limit is reached."""

        def submitted() -> Reply | None:
            if self.engine.unfinished >= self.most:
                return None
            reply = Reply(self, self.engine.submit(ids, **options))
            self._replies[reply.number] = reply
            return reply

        reply: Reply | None = self.between_passes(submitted)
        return reply

    def close(self) -> None:
        """Cancel all requests, whose replies then raise StateError, and end the thread."""
        with contextlib.suppress(StateError):  # it is closed
            self.between_passes(self._end)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._open:
            raise StateError("Service: it has been closed")

    def _end(self) -> None:
        with self._lock:
            self._open = False
        self._fail(StateError("Service: it has been closed"))

    def _cancel(self, number: int) -> None:
        reply = self._replies.pop(number, None)
        if reply is not None:
            self.engine.cancel(number)
            reply._put(last=True)

    def _fail(self, error: Exception) -> None:
        """End all current requests with an error."""
        for reply in self._replies.values():
            reply._put(error, last=True)
        self._replies.clear()
        self.engine.clear()

    def _run(self) -> None:
        while self._open or not self._calls.empty():
            while not self._calls.empty() or (self._open and not self.engine.unfinished):
                function, future = self._calls.get()
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            if not self.engine.unfinished:
                continue
            try:
                tokens = self.engine.step()
            except Exception as error:  # an error of all requests of the pass
                self._fail(error)
                continue
            for token in tokens:
                last = bool(token.finished)
                reply = self._replies.pop(token.request, None) if last else self._replies.get(token.request)
                if reply is not None:
                    reply._put(token, last=last)
