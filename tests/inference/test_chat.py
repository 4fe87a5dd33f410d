"""Chat templates: where they are found, what they refuse, and transformers' own rendering."""

from __future__ import annotations

import json

import pytest

from gpu_ops import models
from gpu_ops.__main__ import main
from gpu_ops.errors import FormatError, OptionError
from gpu_ops.inference import text_model
from gpu_ops.inference.chat import ChatTemplate, template_in

LLAMA = (
    "{{- bos_token }}\n"
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {%- set system = messages[0]['content']|trim %}\n"
    "    {%- set messages = messages[1:] %}\n"
    "{%- else %}\n"
    "    {%- set system = '' %}\n"
    "{%- endif %}\n"
    "{%- if tools is not none and tools is defined %}{{ tools|tojson }}{% endif %}\n"
    "{{- '<|system|>' + system + '<|end|>' }}\n"
    "{%- for m in messages %}\n"
    "    {%- if m.role not in ('user', 'assistant') %}{{ raise_exception('role ' + m.role) }}{% endif %}\n"
    "    {{- '<|' + m.role + '|>\\n' + m.content | trim + eos_token }}\n"
    "    {%- if loop.index > 9 %}{% break %}{% endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|assistant|>\\n' }}\n"
    "{%- endif %}\n"
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "é <b>?"},
    {"role": "assistant", "content": "!"},
    {"role": "user", "content": "Why"},
]


def test_where_a_template_is(tmp_path):
    assert template_in(tmp_path) is None
    entries = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": LLAMA}
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(entries))
    prompt = template_in(tmp_path).render(MESSAGES)
    assert prompt == (
        "<s><|system|>Be brief.<|end|><|user|>\né <b>?</s><|assistant|>\n!</s><|user|>\nWhy</s><|assistant|>\n"
    )
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": LLAMA}]
    path.write_text(json.dumps(entries | {"chat_template": named}))
    assert template_in(tmp_path).render(MESSAGES) == prompt
    (tmp_path / "chat_template.jinja").write_text("{{ messages|length }}{{ bos_token }}")
    assert template_in(tmp_path).render(MESSAGES) == "4<s>"


def test_what_a_template_refuses():
    with pytest.raises(OptionError, match="refuses the messages: role tool"):
        ChatTemplate(LLAMA, TOKENS).render([{"role": "tool", "content": ""}])
    with pytest.raises(FormatError, match="cannot be read"):
        ChatTemplate("{% for %}", TOKENS)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_templates_run_in_a_sandbox(source):
    with pytest.raises(OptionError, match="refuses the messages"):
        ChatTemplate(source, TOKENS).render(MESSAGES)


def test_generate_a_chat(tmp_path, capsys, monkeypatch):
    encoded = []

    class Bytes:
        def encode(self, text, add_special_tokens=True):
            encoded.append((text, add_special_tokens))
            return list(text.encode())

        def decode(self, ids):
            return bytes(ids).decode("latin-1")

    config = models.LlamaConfig(vocab=256, hidden=32, ffn=48, nlayers=1, nheads=4)
    models.save(tmp_path, models.Llama.of(models.initial_weights(config, std=0.2), config), config)
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    monkeypatch.setattr(text_model, "load_tokenizer", lambda path: Bytes())
    arguments = ["generate", "--model", str(tmp_path), "--prompt", "Why", "--max-new-tokens", "3"]
    assert main([*arguments, "--chat"]) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert main([*arguments, "--system", "Be brief."]) == 2
    (tmp_path / "chat_template.jinja").write_text(LLAMA)
    assert main([*arguments, "--chat", "--system", "Be brief."]) == 0
    out = capsys.readouterr().out
    assert encoded[-1] == ("<s><|system|>Be brief.<|end|><|user|>\nWhy</s><|assistant|>\n", False)
    assert not out.startswith("Why")  # the answer alone
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (text,) = answer["texts"]
    assert (text["prompt"], len(text["tokens"]), text["finish_reason"]) == ("Why", 3, "length")
    assert text["text"] == Bytes().decode(text["tokens"])


@pytest.mark.peers
@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:2]], ids=len)
def test_transformers_renders_the_same(messages):
    transformers = pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    assert transformers
    (text,), _ = render_jinja_template([messages], chat_template=LLAMA, add_generation_prompt=True, **TOKENS)
    assert ChatTemplate(LLAMA, TOKENS).render(messages) == text
