"""The chat templates that packages ship, and a tokenizer for each, made on the spot: no model is downloaded."""

from __future__ import annotations

import ast
import re
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.data.chat import Chat

VOCABULARY = 4096
# Where the first of these stands in a template, the others are the stop tokens that such a model's generation_config
# has; the last field is its eos_token, if that is none of them.
FAMILIES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("<|return|>", ("<|return|>", "<|call|>"), ""),
    ("<|observation|>", ("<|user|>", "<|observation|>", "<|endoftext|>"), "<|endoftext|>"),
    ("<turn|>", ("<turn|>", "<|tool_response>"), "<eos>"),
    ("<end_of_turn>", ("<end_of_turn>",), "<eos>"),
    ("<|END_OF_TURN_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",), ""),
    ("<|im_end|>", ("<|im_end|>", "<|endoftext|>"), ""),
    ("<|eot_id|>", ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), ""),
    ("<|eot|>", ("<|eot|>", "<|eom|>"), ""),
    ("<|assistant_end|>", ("<|assistant_end|>",), ""),
    ("<|eos|>", ("<|eos|>",), ""),
    ("<|end_of_text|>", ("<|end_of_text|>",), ""),
    ("<end_of_utterance>", ("<end_of_utterance>",), ""),
    ("<\uff5cend\u2581of\u2581sentence\uff5c>", ("<\uff5cend\u2581of\u2581sentence\uff5c>",), ""),  # DeepSeek
    ("<|end|>", ("<|end|>", "<|endoftext|>"), "<|endoftext|>"),
    ("<|endoftext|>", ("<|endoftext|>",), ""),
)
SPECIAL = re.compile(
    r"<\|[^<>|\s]+\|>|<\uff5c[^<>\uff5c\s]+\uff5c>|<[a-z_]+\|>|<\|[a-z_]+>|<(?:start|end)_[a-z_]+>|\[/?[A-Z_]+\]"
)
LLAMA = ("<|eot_id|>", "<|eot|>")  # whose tokenizers have <|python_tag|>, which not every template of theirs mentions


def templates_of(source: Path) -> dict[str, str]:
    """All chat templates in a folder, a wheel or a source distribution: jinja files, and texts in modules of
    processors, by file name."""
    found = {}
    for name, text in sorted(_files(source)):
        if name.endswith(".jinja"):
            found[Path(name).name.removesuffix(".jinja")] = text
        else:
            constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            for value in constants:
                if isinstance(value, str) and _is_template(value):
                    found[Path(name).name] = value
    return {name: text for name, text in found.items() if _is_template(text)}


def chat_for(template: str) -> Chat:
    """A chat of this template, whose tokenizer has the template's special tokens and else one token per byte."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    stops, eos = _stops(template)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    more = ["<|python_tag|>"] if stops[0] in LLAMA else []
    core.add_special_tokens(sorted({*SPECIAL.findall(template), *stops, eos, "<s>", "</s>", *more}))
    hf: Any = transformers  # its constructors carry no annotations
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token=eos,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    return Chat(tokenizer, tokenizer.convert_tokens_to_ids(list(stops)), VOCABULARY)


def _stops(template: str) -> tuple[tuple[str, ...], str]:
    for token, stops, eos in FAMILIES:
        if token in template:
            return stops, eos or stops[0]
    return ("</s>",), "</s>"


def _is_template(text: str) -> bool:
    return "{%" in text and "messages" in text


def _files(source: Path) -> Iterator[tuple[str, str]]:
    if source.is_dir():
        for file in source.rglob("*"):
            if _wanted(name := file.relative_to(source).as_posix()):
                yield name, file.read_text()
    elif zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as archive:
            yield from ((name, archive.read(name).decode()) for name in archive.namelist() if _wanted(name))
    else:
        with tarfile.open(source) as archive:
            for member in archive.getmembers():
                if _wanted(member.name) and (held := archive.extractfile(member)) is not None:
                    yield member.name, held.read().decode()


def _wanted(name: str) -> bool:
    path = Path(name)
    if "tests" in path.parts:
        return False
    return path.suffix == ".jinja" or (
        path.suffix == ".py" and (path.name.startswith("processing_") or path.parent.name == "processors")
    )
