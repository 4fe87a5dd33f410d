"""Arguments of the commands of ``gpu-ops``. Each command is another module of this folder."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from gpu_ops import __version__
from gpu_ops.errors import OptionError
from gpu_ops.formats.files import path_of, system_errors

__all__ = ["COMMANDS", "SHORT_DTYPES", "WITHOUT_JSON", "check_folder", "make_parser", "positive"]

COMMANDS = {
    "generate": "generate",
    "serve": "serve",
    "train": "train",
    "quantize": "quantize",
    "memory": "memory_report",
    "presets": "preset_report",
    "warmup": "warmup",
    "cache": "cache_report",
    None: "environment_report",
}
"""Module of each command."""

WITHOUT_JSON = ("serve", "train", "warmup")
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""Names of dtypes that the commands take too."""

_DESCRIPTION = "Transformer kernels for arrays. Without a command: devices, backends, versions, caches."


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    is_script = Path(sys.argv[0]).name == "gpu-ops"
    parser = argparse.ArgumentParser(
        prog="gpu-ops" if is_script else "python -m gpu_ops",
        description=_DESCRIPTION,
        epilog="Exit status: 0 done, 1 done and the answer is no, 2 wrong arguments or files, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"gpu_ops {__version__}")
    parser.add_argument("--json", action="store_true", help="the environment as JSON, for a bug report")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help="text from a model's folder or GGUF file"))
    _add_serve(commands.add_parser("serve", help="a model over HTTP, with the API of OpenAI"))
    _add_train(commands.add_parser("train", help="train a small model, or fine-tune one, on a text"))
    _add_quantize(commands.add_parser("quantize", help="a model's folder as a GGUF file for llama.cpp"))
    _add_memory(commands.add_parser("memory", help="what a model takes, by term, and which cards have room"))
    cards = commands.add_parser("presets", help="the cards, or what each kernel would use on one of them")
    cards.add_argument("card", nargs="?", help='such as H200, "RTX 4090" or sm_86')
    _add_json(cards, "as JSON")
    ahead = commands.add_parser("warmup", help="compile every CPU kernel now, so that no first call waits")
    ahead.add_argument("--jobs", type=positive, help="processes that compile (default: one per core)")
    ahead.add_argument("--dtype", type=_dtype, action="append", help="only variants of this dtype; may be repeated")
    ahead.add_argument("--kernel", action="append", help="only kernels named like this; may be repeated")
    kept = commands.add_parser("cache", help="what is kept of compiled kernels, and where")
    kept.add_argument(
        "--clear",
        nargs="?",
        const="all",
        choices=("all", "old"),
        help="remove it: all, or what was made of sources that have changed since",
    )
    _add_json(kept, "as JSON")
    return parser


def _add_json(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the option to a command; before the command it means the same."""
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=text)


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add what says which model runs, and how."""
    parser.add_argument(
        "--model",
        required=True,
        help="folder with config.json, *.safetensors, tokenizer.json; or a GGUF file",
    )
    parser.add_argument("--adapters", metavar="DIR", help="LoRA adapters on it: of gpu-ops train, or of PEFT")
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="a tokenizer.json; default: that in the model's folder"
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file; default: the template in the model's folder or file"
    )
    parser.add_argument("--dtype", type=_dtype, help="such as bfloat16 or bf16; default: that of the files")
    parser.add_argument("--format", help="pack the projections as they are read, such as q8_0, q4_k or nf4")
    parser.add_argument(
        "--activations",
        choices=("native", "int8"),
        help="of products with packed weights: exact (native, the default), or 1.5 to 3 times as fast (int8)",
    )
    parser.add_argument(
        "--kv-dtype", type=_dtype, help="of the cache: int8 or float8_e4m3fn; default: that of the weights"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))


def _add_generate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--prompt", action="append", required=True, help="may be repeated; - reads standard input"
    )
    parser.add_argument(
        "--chat", action="store_true", help="a prompt is a message, in the model's chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system message")
    parser.add_argument("--max-new-tokens", type=positive, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--top-k", type=int, default=0, metavar="K")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be repeated")
    _add_json(parser, "texts, tokens and times as JSON, at the end")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 serves other machines too")
    parser.add_argument("--port", type=int, default=8000, help="default 8000; 0: a free one")
    parser.add_argument("--name", help="of the model in requests; default: that of its folder or file")
    parser.add_argument("--api-key", metavar="KEY", help="that requests must have")
    parser.add_argument(
        "--cache-tokens", type=positive, default=16384, metavar="N", help="room for N tokens of all requests"
    )
    parser.add_argument(
        "--max-requests", type=positive, default=128, metavar="N", help="that run and wait; others get 503"
    )
    parser.add_argument("--log", action="store_true", help="a line per request on stderr")


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text to train on")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="the model or adapters, states, losses; made if missing"
    )
    parser.add_argument("--model", metavar="DIR", help="the model to fine-tune; default: a new small one")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="a tokenizer.json; default: that in the model's folder, of a new model one learnt from the text",
    )
    parser.add_argument("--lora", action="store_true", help="train adapters only; the model does not change")
    parser.add_argument("--rank", type=positive, default=16, help="of the adapters (default 16)")
    parser.add_argument(
        "--base-format", metavar="FORMAT", help="pack the model under the adapters, such as nf4"
    )
    parser.add_argument("--steps", type=positive, default=300, help="default 300")
    parser.add_argument("--batch", type=positive, default=8, help="sequences of a step (default 8)")
    parser.add_argument("--seqlen", type=positive, default=256, help="tokens of a sequence (default 256)")
    parser.add_argument(
        "--lr", type=float, help="peak learning rate; default 2e-3, with --model 2e-5, with --lora 2e-4"
    )
    parser.add_argument(
        "--dtype", type=_dtype, help="float32, bfloat16; default: that of the model, or float32"
    )
    parser.add_argument("--policy", default="none", help="what layers keep: none (default), ..., layer")
    parser.add_argument(
        "--moment-bits", type=int, choices=(8, 32), default=32, help="of AdamW's moments (default 32)"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=positive, default=100, metavar="N", help="steps (default 100)")
    parser.add_argument("--sample-every", type=positive, default=100, metavar="N", help="steps (default 100)")
    parser.add_argument("--prompt", default="The ", help='that samples begin with (default "The ")')
    for name, default, text in (
        ("vocab", 512, "tokens"),
        ("hidden", 256, "width"),
        ("layers", 4, "layers"),
        ("heads", 4, "heads"),
    ):
        parser.add_argument(
            f"--{name}", type=positive, default=default, help=f"of a new model: {text} (default {default})"
        )


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, help="folder with config.json, *.safetensors and tokenizer.json"
    )
    parser.add_argument(
        "--format",
        default="q4_k_m",
        help="q4_k_m (the default), q4_k_s, q5_k_m, q5_k_s, q6_k, q8_0, q4_0, q5_0, iq4_nl, f16, bf16, ...",
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the GGUF file; an old one is replaced")
    _add_json(parser, "the file, its size and the tensors' formats as JSON")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a folder, a config.json, or a name such as llama-3-8b")
    parser.add_argument("--batch", default="1", help="sequences (default 1)")
    parser.add_argument("--seqlen", default="4096", help="tokens of each (default 4096)")
    parser.add_argument("--dtype", default="bf16", help="bf16 (the default), fp16, fp32 or fp64")
    parser.add_argument("--kv-dtype", help="of the KV cache, int8 and float8_e4m3fn too; default: dtype")
    parser.add_argument("--train", action="store_true", help="a training step with AdamW, not inference")
    parser.add_argument("--policy", default="none", help="what layers keep in training: none, ..., layer")
    parser.add_argument("--format", help="of packed projections, such as nf4, q4_k or q8_0; default: arrays")
    parser.add_argument(
        "--pack-tables", action="store_true", help="pack embedding table and output layer too"
    )
    parser.add_argument("--rank", help="of LoRA adapters: only these are trained")
    parser.add_argument(
        "--projections", help="with adapters: qkv,o,gate_up,down (the default) or some of them"
    )
    parser.add_argument(
        "--moment-bits", type=int, choices=(8, 32), default=32, help="of AdamW's moments (default 32)"
    )
    parser.add_argument("--card", help='only this one, such as H200 or "RTX 4090"')
    _add_json(parser, "terms and cards as JSON")


def _dtype(text: str) -> str:
    return SHORT_DTYPES.get(text, text)


def check_folder(command: str, option: str, path: str, name: str) -> None:
    """Require that the path of an option is a folder with a file of this name."""
    where = path_of(command, path)
    with system_errors(command, where):
        if not (where / name).is_file():
            fault = "is a file" if where.is_file() else "has none" if where.exists() else "does not exist"
            raise OptionError(f"{option} must be a folder with {name}; {where} {fault}")


def positive(text: str) -> int:
    """Type of an argument: a whole number of at least 1."""
    with contextlib.suppress(ValueError):
        if (value := int(text)) >= 1:
            return value
    raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
