"""The base in shards (memory.layout: sharded): each rank of the learner holds its rows of every matrix, and a decoder
layer is gathered when a pass comes to it and let go behind it. That is FSDP2, torch.distributed.fsdp.fully_shard.

Gathering copies: logprobs and gradients are to the bit those of a whole base. Every pass of one rank is one of all, and
the adapters, which come later, are whole on each. Of the files a rank reads its own rows alone, so that no more than
those is ever there. A head that is the input embedding as well stays whole: models that have one are small.

Trained as a whole (learner.mode: full) the shards are float32 and what is gathered has model.dtype; behind a layer's
backward pass its gradient is summed over the ranks in float32, and each rank keeps its rows of it. So what takes 16
bytes a weight for AdamW is divided, too.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import get_world_size
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.config import ModelConfig
from learner.model.base import tensor_files
from learner.model.logprob import gather_in_operations
from learner.model.masters import own_rows
from rollout.data.model_files import read_json
from rollout.data.weight_names import check_fit

SHOWN = 3  # names in a message


def sharded_base(
    model: ModelConfig, config: Any, device: torch.device, *, trained: bool, key: str, **options: Any
) -> Any:
    """The causal language model of a transformers config, in model.dtype, over all ranks of the process group.

    trained: as a whole; else it is frozen. key: the setting that names it. options: of `from_config`.

    Raises:
        ValueError: the files hold a weight of the model under another name or in another shape, or it has no decoder
            layers that transformers knows as such.
        WrongInput: they cannot be read, or hold other tensors than the model has.
    """
    dtype: torch.dtype = getattr(torch, model.dtype)
    with init_empty_weights(include_buffers=False):  # buffers are computed, and no part of a checkpoint
        lm: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=False, **options
        )
    if told := read_json(model.source, "generation_config.json"):  # from_config does not, and each checkpoint has it
        lm.generation_config = GenerationConfig.from_dict(told)
    lm.tie_weights()
    files = tensor_files(model.source)
    check_fit(model.source, key)
    _check_all_there(lm, files, model.path)
    mesh = init_device_mesh(device.type, (get_world_size(),))
    precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    # Let go behind each pass, the outermost too, which FSDP2 would keep: it would be old once other weights are loaded.
    _shard(
        lm, model.path, trained, mesh=mesh, reshard_after_forward=True,
        mp_policy=precision if trained else MixedPrecisionPolicy(),
    )  # fmt: skip
    _fill(lm, files, dtype, device, wide=trained)
    lm.tie_weights()
    if trained:
        _train(lm)
    return lm


def _train(lm: Any) -> None:
    for module in lm.modules():
        if isinstance(module, FSDPModule):
            # A batch's coefficients make its gradient a sum. Else it would be a mean, which gloo does not know.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.unshard()  # FSDP2 lays its shards out at the first gathering, in other memory if they are uneven
            module.reshard()


def missing_from(wanted: Mapping[str, Any], found: Mapping[str, Any], path: str) -> str:
    """What a user is told of weights that the files hold under another name, since they cannot be read in parts; ""
    if there are none."""
    odd = sorted(wanted.keys() - found.keys())
    if not odd:
        return ""
    return (
        f"memory.layout: sharded reads each weight by its name, and {len(odd)} of {len(wanted)} are not in the files "
        f"of {path} (first {', '.join(odd[:SHOWN])}); set memory.layout=auto"
    )


def _check_all_there(lm: Any, files: Mapping[str, Path], path: str) -> None:
    if wrong := missing_from(dict(lm.named_parameters()), files, path):
        raise ValueError(wrong)


def _shard(lm: Any, path: str, trained: bool, **how: Any) -> None:
    """Groups that are gathered at once: each decoder layer, the input embedding, the output embedding, the rest."""
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"memory.layout: sharded gathers decoder layers, and {path} has none; set memory.layout=auto")
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    tied = embedding.weight is head.weight
    for layer in layers:
        fully_shard(layer, **how)
    if not tied:
        fully_shard(embedding, **how)
        fully_shard(head, **how)
        gather_in_operations(head)
        # Whose backward pass does without its weight: a frozen head's has formed what it needs (learner.model.logprob).
        (embedding if trained else head).set_unshard_in_backward(False)
    fully_shard(lm.base_model, ignored_params={head.weight} if tied else None, **how)


def _fill(lm: Any, files: Mapping[str, Path], dtype: torch.dtype, device: torch.device, *, wide: bool) -> None:
    """Gives each parameter its content, file by file. wide: in float32, rounded to dtype as if it had that."""
    names: dict[Path, list[str]] = defaultdict(list)
    parameters = dict(lm.named_parameters())
    for name in parameters:
        names[files[name]].append(name)
    for file, own in names.items():
        with safe_open(file, framework="pt") as opened:
            for name in own:
                weight = _read(opened.get_slice(name), parameters[name], name, dtype, device)
                if wide:
                    weight = weight.float()
                path, _, leaf = name.rpartition(".")
                setattr(lm.get_submodule(path), leaf, nn.Parameter(weight, requires_grad=False))


def _read(stored: Any, parameter: Tensor, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """This rank's rows of a weight, or all of one that stays whole."""
    if tuple(stored.get_shape()) != tuple(parameter.shape):
        raise ValueError(
            f"memory.layout: sharded: {name} has the shape {stored.get_shape()} in the files and "
            f"{list(parameter.shape)} in the model; set memory.layout=auto"
        )
    if not isinstance(parameter, DTensor):
        whole: Tensor = stored[:].to(device, dtype)
        return whole
    mesh = parameter.device_mesh
    rows = stored[own_rows(mesh, parameter.shape[0])].to(device, dtype)
    return DTensor.from_local(
        rows, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
