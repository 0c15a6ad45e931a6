"""The engine that the tests of this folder share: starting one costs seconds.

An engine that a test starts for itself takes vLLM's process-wide state with it as it closes, after which the shared one
is dead: so such tests come last, in their file and among the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from examples.random_model import make_tiny_model
from rollout.engine import NoAdapter
from rollout.types import Sampling


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("vllm")
    from tests.rollout.engine_case import PROMPT, EngineCase, run

    # A Llama: vLLM prepares its head for adapters too, which it does not for a Qwen2.
    case = EngineCase(make_tiny_model(tmp_path_factory.mktemp("model"), family="Llama"))
    with pytest.raises(NoAdapter, match="load_adapter first"):
        run(case.engine.generate(PROMPT, Sampling(n=1, max_tokens=4)))
    adapter = case.next_adapter()
    assert run(case.engine.load_adapter(adapter)) == adapter.digest
    yield case
    run(case.engine.close())
