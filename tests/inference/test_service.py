"""Engine in a thread: replies, how they end, and calls from many threads."""

from __future__ import annotations

import sys
import threading

import pytest

from gpu_ops import inference, models
from gpu_ops.errors import DTypeError, OptionError, StateError
from tests.support.processes import PATIENCE

CONFIG = models.LlamaConfig(vocab=64, hidden=32, ffn=48, nlayers=1, nheads=2)
WEIGHTS = models.Llama.of(models.initial_weights(CONFIG, std=0.2), CONFIG)


@pytest.fixture
def make():
    services = []

    def of(pages=64, **options):
        cache = inference.cache_for(WEIGHTS, CONFIG, num_pages=pages)
        services.append(inference.Service(inference.Engine(WEIGHTS, CONFIG, cache), **options))
        return services[-1]

    yield of
    for service in services:
        service.close()


def tokens_of(reply):
    return [token.token for token in reply]


def alone(prompt, count):
    return inference.generate(WEIGHTS, CONFIG, [prompt], max_new_tokens=count)[0]


def test_threads_get_the_tokens_of_their_own_request(make):
    service, results = make(), {}

    def ask(i):
        with service.submit([i, i + 1], max_new_tokens=6) as reply:
            results[i] = tokens_of(reply)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: alone([i, i + 1], 6) for i in range(16)}
    assert service.engine.cache.stats.used == 0


def test_a_cancelled_request_gives_its_pages_back(make):
    service = make()
    with service.submit([1, 2], max_new_tokens=900) as reply:
        assert reply.get(PATIENCE).token == alone([1, 2], 1)[0]
    assert service.between_passes(lambda: service.engine.unfinished) == 0
    assert service.engine.cache.stats.used == 0
    reply.cancel()  # it has ended
    with service.submit([1, 2], max_new_tokens=3) as reply:
        assert tokens_of(reply) == alone([1, 2], 3)


def test_no_more_than_there_may_be(make):
    service = make(most=1)
    with service.submit([1], max_new_tokens=900):
        assert service.submit([2]) is None
    assert tokens_of(service.submit([2], max_new_tokens=1)) == alone([2], 1)


def test_a_timeout_gives_nothing(make):
    service, hold = make(), threading.Event()
    waits = threading.Thread(target=service.between_passes, args=(hold.wait,))
    waits.start()
    reply = inference.Reply(service, 0)
    assert reply.get(timeout=0.01) is None
    hold.set()
    waits.join()


def test_errors_are_those_of_the_call(make, monkeypatch):
    service = make()
    with pytest.raises(OptionError, match="most must lie in"):
        inference.Service(service.engine, most=-1)
    for _ in range(2):
        with pytest.raises(OptionError, match="submit: prompt"):
            service.submit([])
        with pytest.raises(ZeroDivisionError):
            service.between_passes(lambda: 1 // 0)
    step = service.engine.step
    monkeypatch.setattr(service.engine, "step", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        tokens_of(service.submit([1]))
    monkeypatch.setattr(service.engine, "step", step)
    assert tokens_of(service.submit([1], max_new_tokens=2)) == alone([1], 2)


def test_closing_ends_replies_and_the_thread(make):
    service = make()
    reply = service.submit([1], max_new_tokens=900)
    service.close()
    service.close()
    assert not service._thread.is_alive()
    assert service.engine.unfinished == service.engine.cache.stats.used == 0
    with pytest.raises(StateError, match="has been closed"):
        tokens_of(reply)
    reply.cancel()
    with pytest.raises(StateError, match="has been closed"):
        service.submit([1])


def ends(function):
    """Whether a function returns when run in a thread."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return not thread.is_alive()


def test_a_reader_ends_with_its_reply(make):
    """A reader ends if its reply is cancelled by another thread, left, finished or closed, and on a second read."""
    service = make()
    reply, tokens = service.submit([1, 2, 3], max_new_tokens=900), []
    reader = threading.Thread(target=lambda: tokens.extend(reply), daemon=True)
    reader.start()
    reply.cancel()
    reader.join(PATIENCE)
    assert not reader.is_alive()
    assert reply.get() is None
    with service.submit([1], max_new_tokens=50) as left:
        pass
    finished = service.submit([1], max_new_tokens=2)
    assert len(tokens_of(finished)) == 2
    for reply_ in (left, finished):
        assert ends(lambda reply_=reply_: tokens_of(reply_))
        assert ends(lambda reply_=reply_: tokens_of(reply_))
        assert reply_.get(timeout=0) is None
    closed = service.submit([1], max_new_tokens=900)
    service.close()
    for _ in range(2):
        with pytest.raises(StateError, match="closed"):
            tokens_of(closed)


@pytest.mark.parametrize("timeout", [-1, "1", float("nan")])
def test_a_wrong_timeout_is_refused(make, timeout):
    reply = make().submit([1], max_new_tokens=1)
    with pytest.raises((OptionError, DTypeError), match="timeout"):
        reply.get(timeout)


def test_an_engine_with_requests_of_its_own(make):
    service = make()
    service.between_passes(lambda: service.engine.submit([1, 2], max_new_tokens=3))
    assert tokens_of(service.submit([3, 4], max_new_tokens=3)) == alone([3, 4], 3)
    engine = inference.Engine(WEIGHTS, CONFIG, inference.cache_for(WEIGHTS, CONFIG, num_pages=8))
    engine.submit([1, 2], max_new_tokens=3)
    with inference.Service(engine) as other:
        assert tokens_of(other.submit([3, 4], max_new_tokens=3)) == alone([3, 4], 3)
    assert engine.unfinished == 0


def test_a_function_between_passes_may_call_the_service(make):
    service = make()
    reply = service.between_passes(lambda: service.submit([1, 2], max_new_tokens=3))
    assert tokens_of(reply) == alone([1, 2], 3)
    long = service.submit([1], max_new_tokens=900)
    service.between_passes(long.cancel)
    with pytest.raises(SystemExit):
        service.between_passes(lambda: sys.exit(1))
    assert tokens_of(service.submit([1, 2], max_new_tokens=3)) == alone([1, 2], 3)
    service.between_passes(service.close)
    with pytest.raises(StateError, match="closed"):
        service.submit([1])


@pytest.mark.parametrize(("num_pages", "keep"), [(4, 0), (5, 0), (5, 2), (6, 2)])
def test_a_windowed_cache_takes_what_it_can_end(num_pages, keep):
    """A window of 6 spans up to 4 pages of 2 tokens, in addition to kept pages and the null page."""
    config = models.LlamaConfig(vocab=64, hidden=16, ffn=24, nlayers=1, nheads=2, nheads_kv=1, window=6)
    weights = models.Llama.of(models.initial_weights(config), config)
    cache = inference.PagedKVCache(1, 1, 8, num_pages=num_pages, page_size=2, window=6, keep=keep)
    engine = inference.Engine(weights, config, cache)
    engine.submit([5], max_new_tokens=2)
    if num_pages < 5 + keep // 2:
        with pytest.raises(
            OptionError, match=rf"need {4 + keep // 2} pages of 2, and the cache has {num_pages - 1}"
        ):
            engine.submit([1, 2, 3], max_new_tokens=30)
    else:
        engine.submit([1, 2, 3], max_new_tokens=30)
    assert sum(token.finished == "length" for token in engine.run()) == 1 + (num_pages >= 5 + keep // 2)
