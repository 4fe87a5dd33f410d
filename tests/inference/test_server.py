"""HTTP server with the API of OpenAI, around a small model whose tokens are bytes."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time

import numpy as np
import pytest

from gpu_ops import inference, models
from gpu_ops.inference.chat import ChatTemplate
from gpu_ops.inference.server import Server
from gpu_ops.inference.text_model import TextModel
from tests.support.processes import PATIENCE

CONFIG = models.LlamaConfig(vocab=256, hidden=32, ffn=48, nlayers=2, nheads=4, nheads_kv=2)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
ZERO = {"temperature": 0, "max_tokens": 9}


class Bytes:
    def encode(self, text, add_special_tokens=True):
        return type("Encoding", (), {"ids": list(text.encode())})

    def decode(self, ids):
        return bytes(ids).decode("latin-1")


def weights():
    return models.Llama.of(models.initial_weights(CONFIG, std=0.2), CONFIG)


def text_of(prompt, length=9):
    (tokens,) = inference.generate(weights(), CONFIG, [list(prompt.encode())], max_new_tokens=length)
    return Bytes().decode(tokens)


@pytest.fixture
def served():
    """Function that starts a server with a maximum number of requests, and returns it and its port."""
    servers = []

    def make(most=128, pages=512, model=None, config=CONFIG, longest=None, **options):
        model = model or weights()
        engine = inference.Engine(model, config, inference.cache_for(model, config, num_pages=pages))
        text_model = TextModel(
            "tiny", model, config, Bytes(), [], longest, ChatTemplate(TEMPLATE, {"bos_token": "^"})
        )
        servers.append(Server(text_model, inference.Service(engine, most=most), port=0, **options))
        return servers[-1].service, servers[-1].server_port

    yield make
    for server in servers:
        server.close()


def request(port, method, path, body=None, **headers):
    """Status and body of the answer."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def post(port, body, path="/v1/completions"):
    return request(port, "POST", path, json.dumps(body))


def chat(port, *contents, **options):
    messages = [{"role": "user", "content": content} for content in contents]
    return post(port, {"messages": messages, **options}, "/v1/chat/completions")


def completed(port, **body):
    status, answer = post(port, body)
    assert status == 200, answer
    return json.loads(answer)


def events(answer):
    parts = [line.removeprefix("data: ") for line in answer.split("\n\n") if line]
    assert parts.pop() == "[DONE]"
    return [json.loads(part) for part in parts]


def refused(answer, status=400):
    """Entries of an error."""
    assert answer[0] == status, answer
    error = json.loads(answer[1])["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_the_answer_of_a_completion(served):
    _, port = served()
    answer = completed(port, prompt="abc", model="tiny", **ZERO)
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    choice = {"index": 0, "text": text_of("abc"), "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
    assert answer == {"object": "text_completion", "model": "tiny", "choices": [choice], "usage": usage}


def test_the_answer_of_a_chat(served):
    _, port = served()
    prompt = "^<user>Hi<assistant>"
    status, answer = chat(port, "Hi", **ZERO, logprobs=True)
    answer = json.loads(answer)
    assert (status, answer["object"]) == (200, "chat.completion")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": text_of(prompt)}
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == list(text_of(prompt))
    assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    streamed = events(chat(port, "Hi", **ZERO, stream=True)[1])
    assert streamed[0]["choices"][0]["delta"]["role"] == "assistant"
    assert {event["object"] for event in streamed} == {"chat.completion.chunk"}
    assert "".join(event["choices"][0]["delta"]["content"] for event in streamed) == text_of(prompt)
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert json.loads(chat(port, parts, **ZERO)[1])["choices"][0]["message"] == choice["message"]


def test_a_chat_without_a_limit_has_all_the_room(served):
    _, port = served(longest=60)
    (choice,) = json.loads(chat(port, "Hi", temperature=0)[1])["choices"]
    assert len(choice["message"]["content"]) == 60 - len("^<user>Hi<assistant>")


def test_fields_that_change_the_text(served):
    _, port = served()
    text = text_of("abc")
    assert (
        completed(port, prompt="abc", **ZERO, stop=[text[4]])["choices"][0]["text"]
        == text[: text.index(text[4])]
    )
    assert completed(port, prompt="abc", **ZERO, echo=True)["choices"][0]["text"] == "abc" + text
    assert completed(port, prompt=list(b"abc"), **ZERO)["choices"][0]["text"] == text
    several = completed(port, prompt=["abc", "xy"], **ZERO, n=2)["choices"]
    assert [choice["text"] for choice in several] == [text, text, text_of("xy"), text_of("xy")]
    assert [choice["index"] for choice in several] == [0, 1, 2, 3]
    assert completed(port, prompt=[[97, 98, 99]], **ZERO)["choices"][0]["text"] == text
    drawn = completed(port, prompt="abc", max_tokens=9, n=3, seed=5)["choices"]
    assert len({choice["text"] for choice in drawn}) == 3
    again = completed(port, prompt="abc", max_tokens=9, n=1, seed=6)["choices"][0]["text"]
    assert again == drawn[1]["text"]  # the second of seed 5
    penalised = completed(port, prompt="abc", **ZERO, repetition_penalty=50.0, top_k=0, min_p=0.0)
    assert penalised["choices"][0]["text"] != text
    nulls = dict.fromkeys(("n", "stop", "logprobs", "seed", "stream", "top_p", "logit_bias", "user"))
    assert completed(port, prompt="abc", **ZERO, **nulls)["choices"][0]["text"] == text
    assert len(completed(port, prompt="abc", temperature=0)["choices"][0]["text"]) == 16


def test_logprobs_of_a_completion(served):
    _, port = served()
    (choice,) = completed(port, prompt="abc", **ZERO, logprobs=0)["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(9))
    assert len(logprobs["token_logprobs"]) == 9


def test_a_stream_is_the_text_in_pieces(served):
    service, port = served()
    stop = text_of("abc")[4]
    body = {"prompt": "abc", **ZERO, "stream": True, "stop": stop, "stream_options": {"include_usage": True}}
    status, answer = post(port, body)
    assert status == 200
    *pieces, usage = events(answer)
    choices = [event["choices"][0] for event in pieces]
    assert "".join(choice["text"] for choice in choices) == text_of("abc").partition(stop)[0]
    assert choices[-1]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 3
    assert len({event["id"] for event in (*pieces, usage)}) == 1
    assert service.between_passes(lambda: service.engine.cache.stats.used) == 0
    several = events(post(port, {"prompt": ["abc", "xy"], **ZERO, "stream": True, "echo": True})[1])
    for i, prompt in enumerate(("abc", "xy")):
        text = "".join(e["choices"][0]["text"] for e in several if e["choices"][0]["index"] == i)
        assert text == prompt + text_of(prompt)


def test_the_models(served):
    _, port = served()
    status, answer = request(port, "GET", "/v1/models")
    (entry,) = json.loads(answer)["data"]
    assert (status, entry["id"], entry["object"]) == (200, "tiny", "model")
    assert json.loads(request(port, "GET", "/v1/models/tiny")[1]) == entry
    assert json.loads(request(port, "GET", "/health")[1]) == {"status": "ok", "unfinished": 0}
    refused(request(port, "GET", "/v1/models/other"), 404)
    refused(request(port, "GET", "/"), 404)
    refused(post(port, {}, "/v1/embeddings"), 404)
    refused(post(port, {}, "/v1/models"), 405)
    refused(request(port, "GET", "/v1/completions"), 405)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.request("GET", "/v1/chat/completions")
        assert connection.getresponse().headers["Allow"] == "POST"
    answer = refused(post(port, {"prompt": "a", "temperature": "hot"}), 400)
    assert answer["message"] == "temperature must be a number"
    refused(request(port, "PUT", "/v1/completions"), 501)


def test_64_clients_at_a_time_get_their_own_text(served):
    _, port = served()
    prompts = [f"{i} and more" for i in range(64)]
    answers = {}

    def ask(prompt):
        answers[prompt] = completed(port, prompt=prompt, max_tokens=12, temperature=0)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = inference.generate(weights(), CONFIG, [list(p.encode()) for p in prompts], max_new_tokens=12)
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert answers[prompt]["choices"][0]["text"] == Bytes().decode(tokens)


def test_more_than_there_is_room_for_is_503(served):
    _, port = served(most=1)
    error = refused(post(port, {"prompt": ["abc", "xy"]}), 503)
    assert (error["code"], error["type"]) == ("overloaded", "server_error")
    assert completed(port, prompt="abc", **ZERO)


@pytest.mark.slow
def test_a_larger_model_loses_no_request(served):
    """64 concurrent clients send four requests each to a server with room for 40: an answer is 200 or 503, and a
    client retries after a 503."""
    config = models.LlamaConfig(vocab=256, hidden=384, ffn=1024, nlayers=8, nheads=6, nheads_kv=2)
    model = models.Llama.of(models.initial_weights(config), config)
    service, port = served(most=40, pages=1024, model=model, config=config)
    answers, refused = [], []

    def ask(client):
        for number in range(4):
            body = {
                "prompt": f"{client}, {number}: " + "word " * (client % 7),
                "max_tokens": 32,
                "temperature": 0.8,
            }
            while (answer := post(port, body))[0] == 503:
                refused.append(client)
                time.sleep(0.05)
            answers.append((answer[0], json.loads(answer[1])))

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(64)]
    start, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    tokens = sum(body["usage"]["completion_tokens"] for _, body in answers)
    print(
        f"{config.parameters / 1e6:.0f}M parameters: {tokens} tokens in {seconds:.1f} s and {cpu:.1f} s of CPU time; "
        f"{len(refused)} times 503"
    )
    assert [status for status, _ in answers] == [200] * 256
    assert tokens == 256 * 32
    assert refused
    assert service.engine.unfinished == service.engine.cache.stats.used == 0


BAD = [
    ({}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, 256]}, "prompt"),
    ({"prompt": ["a", 3]}, "prompt"),
    ({"prompt": "a\ud800"}, "prompt"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "top_p": "x"}, "top_p"),
    ({"prompt": "a", "top_p": 2}, "top_p"),
    ({"prompt": "a", "temperature": 1e39}, "temperature"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature"),
    ({"prompt": "a", "stop": [5]}, "stop"),
    ({"prompt": "a", "stop": 5}, "stop"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": ["a"] * 100, "n": 2}, "n"),
    ({"prompt": "a", "stream": 1}, "stream"),
    ({"prompt": "a", "stream_options": {"x": 1}}, "stream_options"),
    ({"prompt": "a", "logprobs": 5}, "logprobs"),
    ({"prompt": "a", "logprobs": 0, "echo": True}, "echo"),
    ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "temprature": 1}, "temprature"),
    ({"prompt": "a", "messages": []}, "messages"),
    ([], None),
    ("a", None),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests_are_400_and_harm_nobody(served, body, param):
    service, port = served()
    error = refused(post(port, body))
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert service.engine.unfinished == 0
    assert completed(port, prompt="abc", max_tokens=2)


def test_bad_chats_are_400(served):
    _, port = served()
    path = "/v1/chat/completions"
    for messages, param in (
        (None, "messages"),
        ([], "messages"),
        ([3], "messages[0]"),
        ([{"content": "a"}], "messages[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ([{"role": "tool", "content": "a"}], "messages"),
    ):
        assert refused(post(port, {"messages": messages}, path))["param"] == param
    tools = {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}
    assert refused(post(port, tools, path))["code"] == "unsupported_parameter"


def test_texts_longer_than_the_model_are_refused(served):
    _, port = served(longest=20)
    assert len(completed(port, prompt="a" * 11, **ZERO)["choices"][0]["text"]) == 9
    for body in ({"prompt": "a" * 12, **ZERO}, {"prompt": "a" * 20, "max_tokens": 1}):
        error = refused(post(port, body))
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert refused(chat(port, "a" * 20))["param"] == "messages"


def test_another_model_is_404(served):
    _, port = served()
    assert refused(post(port, {"prompt": "a", "model": "gpt-9"}), 404)["code"] == "model_not_found"


def test_bodies_that_are_no_json(served):
    _, port = served()
    for data in (b"", b"{", b"\xff", b"[" * 100_000):
        refused(request(port, "POST", "/v1/completions", data))
    refused(request(port, "POST", "/v1/completions", b"", **{"Content-Length": "9" * 9}), 413)
    refused(request(port, "POST", "/v1/completions", b"", **{"Content-Length": "-1"}), 411)
    assert completed(port, prompt="abc", max_tokens=2)


def test_a_key(served):
    _, port = served(api_key="secret")
    for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Bearer s\xe4"}):
        assert refused(request(port, "GET", "/v1/models", **headers), 401)["code"] == "invalid_api_key"
    assert request(port, "GET", "/v1/models", Authorization="Bearer secret")[0] == 200


def test_a_connection_is_used_again(served):
    _, port = served()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        for body in ({"prompt": "abc", "max_tokens": 2}, {"prompt": ""}, {"prompt": "abc", "max_tokens": 2}):
            connection.request("POST", "/v1/completions", json.dumps(body))
            answer = connection.getresponse()
            answer.read()
            assert answer.status == (200 if body["prompt"] else 400)
            assert connection.sock is not None


def test_a_failing_pass_ends_its_requests_and_no_more(served, monkeypatch):
    service, port = served()
    step, calls = service.engine.step, []

    def failing():
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError("no memory")
        return step()

    monkeypatch.setattr(service.engine, "step", failing)
    assert refused(post(port, {"prompt": "abc"}), 500)["type"] == "server_error"
    assert post(port, {"prompt": "abc"})[0] == 200
    assert service.engine.unfinished == 0


@pytest.mark.parametrize(
    "leave", [socket.socket.close, lambda s: s.shutdown(socket.SHUT_WR)], ids=["gone", "half-closed"]
)
def test_a_client_that_goes_away_gives_its_pages_back(served, leave):
    service, port = served()
    data = json.dumps({"prompt": "abc", "max_tokens": 5000}).encode()
    client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
    while not service.engine.unfinished:
        time.sleep(0.01)
    leave(client)
    end = time.monotonic() + PATIENCE
    while service.engine.unfinished and time.monotonic() < end:
        time.sleep(0.05)
    client.close()
    assert service.between_passes(lambda: service.engine.cache.stats.used) == 0


def test_sampled_text_follows_from_the_seed(served):
    _, port = served()
    body = {"prompt": "abc", "max_tokens": 20, "temperature": 1.0}

    def text(seed):
        return completed(port, **body, seed=seed)["choices"][0]["text"]

    assert text(5) == text(5)
    assert np.unique([text(seed) for seed in (-1, 0, 2**63)]).size == 2  # -1 is 2^63 - 1, and 2^63 is 0


@pytest.mark.peers
def test_64_openai_clients(served):
    openai = pytest.importorskip("openai", reason="scripts/test_peers.sh installs it")
    service, port = served()
    texts = {}

    def ask(i):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        model = client.models.list().data[0].id
        prompt, message = f"{i} and", {"role": "user", "content": str(i)}
        whole = client.completions.create(model=model, prompt=prompt, max_tokens=6, temperature=0)
        stream = client.completions.create(
            model=model, prompt=prompt, max_tokens=6, temperature=0, stream=True
        )
        streamed = "".join(event.choices[0].text for event in stream)
        answer = client.chat.completions.create(model=model, messages=[message], max_tokens=6, temperature=0)
        events = client.chat.completions.create(
            model=model,
            messages=[message],
            max_completion_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        *pieces, usage = events
        chunks = "".join(event.choices[0].delta.content for event in pieces)
        assert usage.usage.completion_tokens == 6
        texts[i] = whole.choices[0].text, streamed, answer.choices[0].message.content, chunks
        with pytest.raises(openai.BadRequestError, match="logit_bias is not supported"):
            client.completions.create(model=model, prompt=prompt, logit_bias={"5": 1})
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt=prompt)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    prompts = [list(f"{i} and".encode()) for i in range(64)]
    chats = [list(f"^<user>{i}<assistant>".encode()) for i in range(64)]
    expected = inference.generate(weights(), CONFIG, prompts, max_new_tokens=6)
    answers = inference.generate(weights(), CONFIG, chats, max_new_tokens=6)
    for i in range(64):
        text, answer = Bytes().decode(expected[i]), Bytes().decode(answers[i])
        assert texts[i] == (text, text, answer, answer)
    assert service.engine.unfinished == 0
