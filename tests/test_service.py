"""An engine in a thread: replies, what ends them, and calls from many threads."""

from __future__ import annotations

import threading

import pytest

from gpu_ops import inference, models
from gpu_ops.errors import OptionError, StateError
from tests.processes import PATIENCE

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
    service, found = make(), {}

    def ask(i):
        with service.submit([i, i + 1], max_new_tokens=6) as reply:
            found[i] = tokens_of(reply)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: alone([i, i + 1], 6) for i in range(16)}
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
