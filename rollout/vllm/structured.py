"""Restricts completions to a form that the user gives (rollout.structured_outputs), by a logits processor of vLLM.

xgrammar, which vLLM's own structured outputs use as well, compiles the form for a tokenizer. The logits processor then
excludes the tokens that the form does not allow. vLLM's own structured outputs do so before logprobs are recorded,
which would then be of the remaining tokens, while the learner's are of the whole distribution. This processor does so
after logprobs are recorded, as top_p does (EngineSettings.truncates).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import xgrammar
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from cluster.errors import WrongInput
from rollout.data.model_files import joined, load_tokenizer
from rollout.vllm.convert import FORM

KEY = "rollout.structured_outputs"


class Grammars:
    """Compiles and keeps the forms for one model.

    Args:
        model: folder, hub name or name@revision.
        vocabulary: how many logits the model has for a token.
    """

    def __init__(self, model: str, vocabulary: int) -> None:
        self._model, self._vocabulary = model, vocabulary
        self._compiled: dict[str, Any] = {}

    def matcher(self, form: str, stop_ids: Sequence[int]) -> Any:
        """An xgrammar.GrammarMatcher at the beginning of a completion.

        form: StructuredOutputs.form of rollout.config. stop_ids: tokens that end a completion; they are allowed only
        where the form may end. Raises WrongInput.
        """
        key = json.dumps([form, sorted(stop_ids)])
        if key not in self._compiled:
            self._compiled[key] = self._compile(form, stop_ids)
        return xgrammar.GrammarMatcher(self._compiled[key])

    def _compile(self, form: str, stop_ids: Sequence[int]) -> Any:
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
        except Exception as error:  # the native library raises RuntimeError, ValueError and classes of its own
            said = " ".join(str(error).split())[-300:]
            raise WrongInput(f"{KEY}.{kind}: cannot be compiled for this model: {said}; correct it") from error


def choice(texts: Sequence[str]) -> str:
    """A grammar that allows exactly these texts."""
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


class _Form:
    """The form's state in one running completion. output: its tokens, a list to which vLLM appends."""

    def __init__(self, matcher: Any, output: list[int]) -> None:
        self._matcher, self._output, self._seen = matcher, output, 0

    def fill(self, bitmask: Tensor, row: int) -> None:
        """Writes the allowed next tokens into a row of the bitmask. Raises RuntimeError for a sampled token that the
        form does not allow."""
        for token in self._output[self._seen :]:
            if not self._matcher.is_terminated() and not self._matcher.accept_token(token):
                raise RuntimeError(f"structured outputs: token {token} at place {self._seen} is not of the form")
            self._seen += 1
        if self._matcher.is_terminated():  # vLLM may sample beyond the end and then drops these tokens
            bitmask[row].fill_(-1)
        else:
            self._matcher.fill_next_token_bitmask(bitmask, row)


class StructuredOutputs(LogitsProcessor):
    """The logits processor that vLLM makes, since EngineArgs.logits_processors names it."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        served = vllm_config.model_config
        self._vocabulary = served.get_vocab_size()
        self._grammars = Grammars(joined(served.tokenizer, served.tokenizer_revision), self._vocabulary)
        self._forms: dict[int, _Form] = {}  # row of the batch -> its form

    def is_argmax_invariant(self) -> bool:
        """False, since the likeliest token may be excluded."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows vLLM's changes to the rows of the batch."""
        process_dict_updates(self._forms, batch_update, self._begin)

    def _begin(self, params: Any, prompt: list[int] | None, output: list[int]) -> _Form | None:
        form = (params.extra_args or {}).get(FORM)
        if form is None:
            return None
        stop_ids = {*params.all_stop_token_ids, *(params.stop_token_ids or ())}
        return _Form(self._grammars.matcher(form, sorted(stop_ids)), output)

    def apply(self, logits: Tensor) -> Tensor:
        """Sets the logits [rows, vocabulary] of tokens that are not allowed to minus infinity, in place."""
        if not self._forms:
            return logits
        bitmask = xgrammar.allocate_token_bitmask(len(self._forms), self._vocabulary)
        for row, form in enumerate(self._forms.values()):
            form.fill(bitmask, row)
        whole = torch.full((len(logits), bitmask.shape[1]), -1, dtype=bitmask.dtype)
        rows = list(self._forms)
        whole[rows] = bitmask
        xgrammar.apply_token_bitmask_inplace(logits, whole.to(logits.device), vocab_size=self._vocabulary, indices=rows)
        return logits
