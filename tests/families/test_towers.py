"""The text part of every checkpoint with towers in examples/random_towers.py: it is exactly what the whole model
computes of text, its adapters fit the whole model, and the whole system takes three steps by adapter, by merged weights
and trained as a whole. vLLM, too, loads the text part alone, and loads its exported adapters on the whole model.
`make test-families`."""

from __future__ import annotations

import math
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.learner.model_families import run
from examples.random_towers import CHECKPOINTS, make_checkpoint
from learner.model.adapter_config import served
from learner.model.export import export
from rollout.text_part import text_tensors
from rollout.vllm.environment import required_env
from tests.learner.model.test_packing_check import random_adapter
from tests.learner.model.test_policy import make_policy
from tests.learner.model.test_text_part import EQUAL, IDS, check_export, check_text_part, logprobs

pytestmark = pytest.mark.long
LIMIT = 2e-5  # nats
WAYS: dict[str, dict[str, Any]] = {"adapter": {}, "merged": {"push": "merged"}, "full": {"mode": "full"}}
WITH_EXPERTS = ("llama4", "qwen3_5_moe")  # are not trained as a whole
HYBRID = ("qwen3_5", "qwen3_5_moe")  # vLLM's modules of them import torchvision
# Gemma 4's is larger than LIMIT because transformers' float32 alone differs from its float64 by 1.5e-5, and by 3.1e-5
# in gemma4_dense.
LIMITS = dict.fromkeys((*HYBRID, "gemma4", "gemma4_dense"), 5e-5)
# Standard deviation of the weights of random adapters. Qwen3.5's adapter changes the decay, which is an exponent: with
# 0.2 float32's rounding becomes 5e-4 nats, in PEFT's model as in ours (each compared with float64).
SIZE = 0.2
SIZES = {"qwen3_5": 0.1}
TOGETHER = [(name, way) for name in CHECKPOINTS for way in WAYS if way != "full" or name not in WITH_EXPERTS]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_text_part_is_what_the_whole_model_computes_of_text(name: str, tmp_path: Path) -> None:
    check_text_part(make_checkpoint(tmp_path, name))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_an_exported_adapter_fits_the_whole_model(name: str, tmp_path: Path) -> None:
    check_export(make_checkpoint(tmp_path / "checkpoint", name), tmp_path / "adapter", SIZES.get(name, SIZE))


@pytest.mark.parametrize(("name", "way"), TOGETHER)
def test_sampler_and_learner_are_one_policy(name: str, way: str, tmp_path: Path) -> None:
    if name in HYBRID:
        pytest.importorskip("torchvision")
    steps = run(f"{name}+towers", tmp_path, 3, WAYS[way])
    assert len(steps) == 3
    assert max(step["policy/mismatch_max"] for step in steps) < LIMITS.get(name, LIMIT)


def of_next_token(every: torch.Tensor) -> torch.Tensor:
    """[59]: of logprobs [60, V] those of the tokens of IDS behind the first."""
    return every[:-1].gather(-1, IDS[0, 1:, None])[:, 0]


def in_vllm(model: str, adapter: str | None, *, whole: bool) -> tuple[list[float], int]:
    """(the prompt logprobs of IDS, the bytes of the engine's parameters), in a process of its own. whole: of the
    checkpoint's own class in vLLM; else of the text part, as generators load it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**required_env(cuda=False), "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}.items():
            patch.setenv(name, value)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(_in_vllm, (model, adapter, whole))


def _in_vllm(model: str, adapter: str | None, whole: bool) -> tuple[list[float], int]:
    from rollout.engine import EngineSettings
    from rollout.vllm.arguments import build_engine, engine_arguments, lora_arguments
    from rollout.vllm.cpu import prepare_cpu_process

    prepare_cpu_process()
    from vllm import EngineArgs, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

    sizes = _loaded_sizes()
    settings = EngineSettings(
        model=model, dtype="float32", max_model_len=256, kv_cache_bytes=32 << 20, max_num_seqs=8,
        max_lora_rank=16 if adapter else 0, adapter_window=2, seed=0,
    )  # fmt: skip
    arguments = engine_arguments(settings, cuda=False)
    if whole:
        arguments |= lora_arguments(model, ()) if adapter else {}
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments, language_model_only=True))
    else:
        engine = build_engine(arguments, shares_base=False)
    ids = IDS[0].tolist()
    request = None if adapter is None else LoRARequest("policy", 1, adapter)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    engine.add_request("one", TokensPrompt(prompt_token_ids=ids), asked, lora_request=request)
    while engine.has_unfinished_requests():
        outputs: Any = engine.step()
        for output in outputs:
            if output.finished:
                found = [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    return found, sizes[0]


def _loaded_sizes() -> list[int]:
    """A list to which each later load of a model adds the bytes of its parameters. Afterwards vLLM on a CPU repacks
    them into buffers that it does not tell."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    load: Any = DefaultModelLoader.load_weights
    sizes: list[int] = []

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        load(self, model, model_config)
        sizes.append(sum(weight.numel() * weight.element_size() for weight in model.parameters()))

    DefaultModelLoader.load_weights = load_weights  # type: ignore[method-assign]
    return sizes


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_vllm_holds_the_text_part_alone_and_exported_adapters_fit_the_whole_checkpoint(
    name: str, tmp_path: Path
) -> None:
    checkpoint, folder = make_checkpoint(tmp_path / "checkpoint", name), tmp_path / "adapter"
    if name in HYBRID:
        pytest.importorskip("torchvision")
    policy = make_policy(str(checkpoint))
    random_adapter(policy, SIZES.get(name, SIZE))
    own = of_next_token(logprobs(policy))
    export(policy, folder, str(checkpoint))

    base, held = in_vllm(str(checkpoint), None, whole=False)
    assert float((torch.tensor(base) - own).abs().max()) > 1
    stored = load_file(checkpoint / "model.safetensors")
    decoder = dict(text_tensors(stored.items()))
    text = sum(tensor.numel() * 4 for tensor in decoder.values())
    assert text < sum(tensor.numel() * 4 for tensor in stored.values())
    # Where keys are values, vLLM holds their one matrix as two.
    text += sum(
        tensor.numel() * 4
        for key, tensor in decoder.items()
        if "k_proj" in key and key.replace("k_proj", "v_proj") not in decoder
    )
    assert math.isclose(held, text, rel_tol=0.01)

    # vLLM's own kernel of the delta rule computes in bfloat16: there the text part in our float32 engine reads it.
    pytest.importorskip("torchvision")
    # vLLM's class of the whole GLM-4V computes something else of text, 1.2 nats without an adapter; `gleaner serve`
    # refuses it. So there, too, the text part reads what was exported.
    found, _ = in_vllm(str(checkpoint), str(served(folder)), whole=name not in (*HYBRID, "glm4v"))
    assert float((torch.tensor(found) - own).abs().max()) < EQUAL
