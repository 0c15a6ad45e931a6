"""The form of completions, compiled for a tokenizer by the library that vLLM compiles its own with.

As a process (learner.driver.input_checks) it tries the form of a run: a configuration as JSON on stdin, a list of
sentences as the last line on stdout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rollout.architecture import text_of
from rollout.data.hub import CONFIG, joined, load_tokenizer, read_json

KEY = "rollout.structured_outputs"


class GrammarError(ValueError):
    """The form cannot be compiled; the text is one line."""


class Grammars:
    """Those of one model.

    Args:
        model: folder, hub name or name@revision.
        vocabulary: of the model's output, entries.
    """

    def __init__(self, model: str, vocabulary: int) -> None:
        self._model, self._vocabulary = model, vocabulary
        self._compiled: dict[str, Any] = {}

    def matcher(self, form: str, stop_ids: Sequence[int]) -> Any:
        """An xgrammar.GrammarMatcher at the begin of a completion.

        form: StructuredOutputs.form of rollout.config. stop_ids: tokens that end a completion, allowed where the
        form may end and nowhere else. Raises GrammarError.
        """
        import xgrammar

        key = json.dumps([form, sorted(stop_ids)])
        if key not in self._compiled:
            self._compiled[key] = self._compile(form, stop_ids)
        return xgrammar.GrammarMatcher(self._compiled[key])

    def _compile(self, form: str, stop_ids: Sequence[int]) -> Any:
        import xgrammar

        ((kind, given),) = json.loads(form).items()
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(
                load_tokenizer(self._model), vocab_size=self._vocabulary, stop_token_ids=sorted(stop_ids)
            )
            compiler = xgrammar.GrammarCompiler(info, max_threads=1)
            if kind == "regex":
                return compiler.compile_regex(given)
            if kind == "json_schema":
                return compiler.compile_json_schema(json.dumps(given))
            return compiler.compile_grammar(given if kind == "grammar" else choice(given))
        except Exception as error:  # of a native library: RuntimeError, ValueError and classes of its own
            said = " ".join(str(error).split())[-300:]
            raise GrammarError(f"{KEY}.{kind}: cannot be compiled for this model: {said}; correct it") from error


def choice(texts: Sequence[str]) -> str:
    """One of the texts, as a grammar."""
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def wrong_with(config: dict[str, Any]) -> list[str]:
    """One sentence, or none. config: of the run."""
    model = joined(config["model"]["path"], config["model"]["revision"])
    given = {name: value for name, value in config["rollout"]["structured_outputs"].items() if value is not None}
    vocabulary = int(text_of(read_json(model, CONFIG))["vocab_size"])
    try:
        Grammars(model, vocabulary).matcher(json.dumps(given), [vocabulary - 1])
    except GrammarError as error:
        return [str(error)]
    return []


if __name__ == "__main__":
    print(json.dumps(wrong_with(json.loads(sys.stdin.read()))))
