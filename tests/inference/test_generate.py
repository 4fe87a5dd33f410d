"""Command ``generate`` and the example server, with a small model and a tokenizer of bytes."""

from __future__ import annotations

import http.client
import io
import json
import sys
import threading
import time

import numpy as np
import pytest

import gpu_ops
from gpu_ops import inference, models
from gpu_ops.__main__ import main
from gpu_ops.errors import OptionError
from gpu_ops.inference import command
from tests.models.model_files import metadata, stored
from tests.support.processes import PATIENCE

CONFIG = models.LlamaConfig(vocab=256, hidden=32, ffn=48, nlayers=2, nheads=4, nheads_kv=2)


class Bytes:
    def encode(self, text):
        return type("Encoding", (), {"ids": list(text.encode())})

    def decode(self, ids):
        return bytes(ids).decode("latin-1")


def weights():
    return models.Llama.of(models.initial_weights(CONFIG, std=0.2), CONFIG)


def text_of(prompt, count):
    (tokens,) = inference.generate(weights(), CONFIG, [list(prompt.encode())], max_new_tokens=count)
    return Bytes().decode(tokens)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    models.save(tmp_path, weights(), CONFIG)
    monkeypatch.setattr(command, "load_tokenizer", lambda path: Bytes())
    return tmp_path


def test_generate(folder, capsys):
    assert main(["generate", "--model", str(folder), "--prompt", "abc", "--max-new-tokens", "9"]) == 0
    printed = capsys.readouterr()
    assert printed.out == text_of("abc", 9) + "\n"
    assert printed.err.startswith("3 prompt tokens, first token after ")


def test_generate_packs_floats(folder, monkeypatch):
    packed = []
    monkeypatch.setattr(
        command, "with_packed", lambda weights: packed.append(models.with_packed(weights)) or packed[-1]
    )
    assert main(["generate", "--model", str(folder), "--prompt", "abc", "--max-new-tokens", "3"]) == 0
    assert isinstance(packed[0].embed, gpu_ops.PackedMatrix)


def test_generate_passes_on_how_weights_are_packed(folder, capsys, monkeypatch):
    config = models.LlamaConfig(vocab=256, hidden=32, ffn=64, nlayers=1, nheads=4)
    models.save(folder, models.Llama.of(models.initial_weights(config, std=0.2), config), config)
    loaded = []
    monkeypatch.setattr(
        command, "load", lambda *args, **options: loaded.append(models.load(*args, **options)) or loaded[-1]
    )
    arguments = ["--prompt", "abc", "--max-new-tokens", "2", "--format", "q4_0", "--activations", "int8"]
    assert main(["generate", "--model", str(folder), *arguments]) == 0
    ((packed, _),) = loaded
    assert packed.layers[0].qkv.formats == ((96, "q4_0"),)
    assert packed.layers[0].qkv.activations == "int8"
    assert main(["generate", "--model", str(folder), "--prompt", "abc", "--format", "q9"]) == 2
    assert "format='q9' is unknown" in capsys.readouterr().err


def test_generate_for_several_prompts_up_to_a_stop_string(folder, capsys):
    stop = text_of("abc", 9)[4]
    options = ["--prompt", "abc", "--prompt", "xy", "--max-new-tokens", "9", "--stop", stop]
    assert main(["generate", "--model", str(folder), *options]) == 0
    texts = [f"{prompt}{text_of(prompt, 9).partition(stop)[0]}" for prompt in ("abc", "xy")]
    assert capsys.readouterr().out == "".join(f"{text}\n\n" for text in texts)


def test_ends_of_a_text(folder):
    for entries, ends in (({"eos_token_id": 7}, [7]), ({"eos_token_id": [7, 9]}, [7, 9]), ({}, [])):
        (folder / "generation_config.json").write_text(json.dumps(entries))
        assert command.end_tokens(folder) == ends


def test_generate_from_a_gguf_file(folder, capsys):
    path, tensors = folder / "a.gguf", stored(weights(), CONFIG, "llama")
    keys = {"general.architecture": "llama", **metadata(CONFIG, "llama"), "tokenizer.ggml.eos_token_id": 7}
    gpu_ops.write_gguf(path, tensors, keys)
    arguments = ["generate", "--model", str(path), "--prompt", "abc", "--max-new-tokens", "9"]
    assert main(arguments) == 2
    assert "the vocabulary within a GGUF file is not read: pass --tokenizer FILE" in capsys.readouterr().err
    for tokenizer in (["--tokenizer", str(folder / "other.json")], []):
        (folder / "tokenizer.json").touch()  # in the folder of the file
        assert main([*arguments, *tokenizer]) == 0
        assert capsys.readouterr().out == text_of("abc", 9) + "\n"
    assert command.end_tokens(path) == [7]
    more = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 8}
    gpu_ops.write_gguf(path, tensors, keys | more)
    assert command.end_tokens(path) == [7, 9, 8]
    gpu_ops.write_gguf(path, tensors, {**keys, "tokenizer.ggml.eos_token_id": -1})
    with pytest.raises(OptionError, match="eos_token_id"):
        command.end_tokens(path)


def test_mistakes_are_one_line(tmp_path, folder, capsys):
    (folder / "model.safetensors").unlink()
    assert main(["generate", "--model", str(folder), "--prompt", "a"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("generate: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", "-"), "standard input is no UTF-8"),
        (("--prompt", ""), "prompt is empty"),
        (("--prompt", "a", "--max-new-tokens", "1" + "0" * 30), "num_pages must lie in"),
        (("--prompt", "a", "--temperature", "nan"), "temperature must be finite"),
        (("--prompt", "a", "--model", "a" * 300), "File name too long"),
        (("--prompt", "a", "--model", "a\0b"), "it holds a NUL"),
    ],
)
def test_absurd_arguments_are_one_line(folder, capsys, monkeypatch, arguments, words):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8"))
    assert main(["generate", "--model", str(folder), *arguments]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n"), error.count("generate: ")) == ("", 1, 1)
    assert words in error


# ---- the server --------------------------------------------------------------------------------------------


@pytest.fixture
def served(example):
    """Function that starts a server with a maximum number of requests, and returns its service and port."""
    module, servers = example("server"), []

    def make(most=128, pages=512, model=None, config=CONFIG):
        of = model or weights()
        engine = inference.Engine(of, config, inference.cache_for(of, config, num_pages=pages))
        service = inference.Service(engine, most=most)
        servers.append(module.serve(service, Bytes(), [], "127.0.0.1", 0))
        return service, servers[-1].server_port

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def post(port, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_64_clients_at_a_time_get_their_own_text(served):
    _, port = served()
    prompts = [f"{i} and more" for i in range(64)]
    answers = {}

    def ask(prompt):
        answers[prompt] = post(port, {"prompt": prompt, "max_tokens": 12, "temperature": 0})

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = inference.generate(weights(), CONFIG, [list(p.encode()) for p in prompts], max_new_tokens=12)
    for prompt, tokens in zip(prompts, expected, strict=True):
        status, body = answers[prompt]
        assert status == 200
        (choice,) = json.loads(body)["choices"]
        assert choice == {"index": 0, "text": Bytes().decode(tokens), "finish_reason": "length"}


def test_a_stream_is_the_text_in_pieces(served):
    service, port = served()
    stop = text_of("abc", 9)[4]
    body = {"prompt": "abc", "max_tokens": 9, "temperature": 0, "stream": True, "stop": stop}
    status, answer = post(port, body)
    assert status == 200
    events = [line.removeprefix("data: ") for line in answer.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == text_of("abc", 9).partition(stop)[0]
    assert choices[-1]["finish_reason"] == "stop"
    assert service.engine.cache.stats.used == 0


def test_more_than_there_is_room_for_is_503(served):
    _, port = served(most=0)
    status, body = post(port, {"prompt": "abc"})
    assert (status, json.loads(body)) == (503, {"error": "too many requests are here; try again"})


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
    {},
    {"prompt": 3},
    {"prompt": ""},
    {"prompt": "a", "max_tokens": -1},
    {"prompt": "a", "top_p": "x"},
    {"prompt": "a", "temperature": 1e39},
    {"prompt": "a", "stop": [5]},
    {"prompt": "a", "stop": 5},
    [],
]


@pytest.mark.parametrize("body", BAD, ids=str)
def test_bad_requests_are_400_and_harm_nobody(served, body):
    _, port = served()
    assert post(port, body)[0] == 400
    assert post(port, {"prompt": "abc", "max_tokens": 2})[0] == 200


def test_a_failing_pass_ends_its_requests_and_no_more(served, monkeypatch):
    service, port = served()
    step, calls = service.engine.step, []

    def failing():
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError("no memory")
        return step()

    monkeypatch.setattr(service.engine, "step", failing)
    assert post(port, {"prompt": "abc"})[0] == 500
    assert post(port, {"prompt": "abc"})[0] == 200
    assert service.engine.unfinished == 0


def test_a_client_that_goes_away_gives_its_pages_back(served):
    service, port = served()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "abc", "max_tokens": 5000}))
    while not service.engine.unfinished:
        time.sleep(0.01)
    connection.close()
    end = time.monotonic() + PATIENCE
    while service.engine.unfinished and time.monotonic() < end:
        time.sleep(0.05)
    assert service.between_passes(lambda: service.engine.cache.stats.used) == 0


def test_sampled_text_follows_from_the_seed(served):
    _, port = served()
    body = {"prompt": "abc", "max_tokens": 20, "temperature": 1.0, "seed": 5}
    assert post(port, body) == post(port, body)
    assert np.unique([post(port, {**body, "seed": i})[1] for i in range(3)]).size == 3
