"""Where vLLM would put each tensor of a checkpoint: its own loading code, run on a model and a checkpoint that have no
weights (torch's meta device). No engine is started, and nothing is read but names and shapes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rollout.data.hub import split
from rollout.shared_base.manifest import View
from rollout.vllm.startup import know_model
from rollout.vllm.view_recorder import ViewRecorder


def views_of(path: str, dtype: str, stored: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, View], dict[str, str]]:
    """(view of each tensor by its name, why the others have none), as rollout.vllm.view_recorder has them.

    stored: the names of the checkpoint's tensors, and their shapes. For a process that does nothing else: vLLM keeps
    groups of processes, here of one, for as long as it lives.

    Raises what vLLM raises: where it cannot load the model, where that needs numbers, or without the device that it was
    built for.
    """
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model

    name, revision = split(path)
    know_model(name, revision)
    kind: Any = dtype  # vLLM lists the names that it takes
    args = EngineArgs(
        model=name, revision=revision, dtype=kind, trust_remote_code=False, enforce_eager=True, skip_tokenizer_init=True
    )
    config = args.create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        initialize_model_parallel()
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            with torch.device("meta"):
                model: Any = initialize_model(vllm_config=config)
        finally:
            torch.set_default_dtype(before)
        recorder = ViewRecorder(model.named_parameters())

        def checkpoint() -> Iterator[tuple[str, Tensor]]:
            for name, shape in stored.items():
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                recorder.source(name, tensor)
                yield name, tensor

        with recorder:
            model.load_weights(checkpoint())
    return recorder.views()
