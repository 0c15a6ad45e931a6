"""A row of the smoke run: the learner's fused operations on a card against transformers' own, values and time.

Four layers of the shape in bfloat16 with random weights; the gradient of all of them, by both ways, against the same in
float32. What the fused operations round they round less often, so their error may not be larger.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import relative_error
from benchmarks.gpu.rows import Found
from cluster.memory.shape import Shape
from learner.model.fusion import fuse

LAYERS, TURNS = 4, 10
WORSE = 1.2  # a random direction of rounding


def compare(shape: Shape, tokens: int, device: str) -> Found:
    """Raises AssertionError if the fused gradient is further from float32's than the plain one."""
    config = AutoConfig.for_model(**replace(shape, layers=LAYERS).to_config())
    ids = torch.randint(shape.vocab, (1, tokens), device=device, generator=torch.Generator(device).manual_seed(0))

    def model(dtype: torch.dtype) -> Any:
        torch.manual_seed(0)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).eval()

    plain, fused, exact = model(torch.bfloat16), model(torch.bfloat16), model(torch.float32)
    exact.load_state_dict(plain.state_dict())  # the rounded weights
    fuse(fused, lambda: fused.model(ids[:, :8]), on_card=device == "cuda")
    wanted = _gradient(exact, ids)
    errors = [relative_error(_gradient(one, ids), wanted) for one in (plain, fused)]
    seconds = [min(_seconds(one, ids, device) for _ in range(TURNS)) for one in (plain, fused)]
    assert errors[1] <= WORSE * errors[0], f"gradient: fused {errors[1]:.2e} from float32, plain {errors[0]:.2e}"
    return {"plain_error": errors[0], "fused_error": errors[1], "times_as_fast": seconds[0] / seconds[1]}


def _gradient(lm: Any, ids: Tensor) -> Tensor:
    """Of all weights, one below the other, in float64."""
    states = lm.model(ids, use_cache=False).last_hidden_state
    slopes = torch.autograd.grad(states.float().square().mean(), list(lm.model.parameters()))
    return torch.cat([slope.double().flatten() for slope in slopes])


def _seconds(lm: Any, ids: Tensor, device: str) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    lm.model(ids, use_cache=False).last_hidden_state.square().mean().backward()
    wait()
    return time.perf_counter() - started
