"""Loads a base that is sharded over the learner's ranks (memory.layout: sharded) by FSDP2,
torch.distributed.fsdp.fully_shard: each rank holds its rows of every matrix, and a decoder layer is gathered for its
forward or backward pass and freed afterwards.

Gathering only copies, so logprobs and gradients are bit for bit those of a whole base. All ranks must run every pass
together. Adapters, which are added later, are whole on each rank. A rank reads only its own rows from the files, so the
whole base is never in its memory. A head that is tied to the input embedding stays whole: models with tied embeddings
are small.

If the model is trained as a whole (learner.mode: full), the shards are float32, and gathered layers have model.dtype.
After a layer's backward pass its gradient is summed over the ranks in float32, and each rank keeps its rows of it. So
the 16 bytes per weight of AdamW are divided among the ranks, too.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import get_world_size
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.config import ModelConfig
from learner.model.base import tensor_files
from learner.model.bases.empty import empty_model
from learner.model.logprob import decoder_of, gather_in_operations
from learner.model.masters import own_rows
from rollout.data.weight_names import check_fit

SHOWN = 3  # number of weights that a message names


def sharded_base(
    model: ModelConfig, config: Any, device: torch.device, *, trained: bool, key: str, **options: Any
) -> Any:
    """Returns the causal language model of a transformers config in model.dtype, sharded over the process group.

    trained: whether the model is trained as a whole; else it is frozen. key: the setting that names the model, for
    messages. options: arguments of `from_config`.

    Raises:
        ValueError: the files hold a weight of the model under another name or in another shape, or transformers has no
            decoder layers (GradientCheckpointingLayer) for the model.
        WrongInput: the files cannot be read, or hold other tensors than the model has.
    """
    dtype: torch.dtype = getattr(torch, model.dtype)
    lm = empty_model(config, dtype, model.source, **options)
    files = tensor_files(model.source)
    check_fit(model.source, key)
    _check_all_there(lm, files, model.path)
    mesh = init_device_mesh(device.type, (get_world_size(),))
    precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    # Every group is freed after each pass. FSDP2 would by default keep the outermost group gathered, and it would then
    # hold old values after other weights are loaded.
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
            # The gradient is a sum over ranks, since coefficients are those of the whole batch. FSDP2's default is a
            # mean, which gloo does not have.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.unshard()  # FSDP2 moves uneven shards to other memory at the first gathering, so it is done now
            module.reshard()


def missing_from(wanted: Mapping[str, Any], found: Mapping[str, Any], path: str) -> str:
    """Returns the message about weights that the files do not hold under their names, so that they cannot be read in
    parts; "" if there are none."""
    odd = sorted(wanted.keys() - found.keys())
    if not odd:
        return ""
    return (
        f"memory.layout: sharded reads each weight by its name, and {len(odd)} of {len(wanted)} are not in the files "
        f"of {path} (first {', '.join(odd[:SHOWN])}); set memory.layout=auto"
    )


def _check_all_there(lm: Any, files: Mapping[str, tuple[Path, str]], path: str) -> None:
    if wrong := missing_from(dict(lm.named_parameters()), files, path):
        raise ValueError(wrong)


def _shard(lm: Any, path: str, trained: bool, **how: Any) -> None:
    """Makes the groups that FSDP2 gathers at once: each decoder layer, the input embedding, the output embedding, and
    the rest."""
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
        # The backward pass of an embedding does not need its weight. Nor does that of a frozen head, since the forward
        # pass has computed what it needs (learner.model.logprob).
        (embedding if trained else head).set_unshard_in_backward(False)
    fully_shard(decoder_of(lm), ignored_params={head.weight} if tied else None, **how)


def _fill(
    lm: Any, files: Mapping[str, tuple[Path, str]], dtype: torch.dtype, device: torch.device, *, wide: bool
) -> None:
    """Gives each parameter its content, file by file. wide: parameters are float32, with values rounded to dtype."""
    names: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    parameters = dict(lm.named_parameters())
    for name in parameters:
        file, stored = files[name]
        names[file].append((name, stored))
    for file, own in names.items():
        with safe_open(file, framework="pt") as opened:
            for name, stored in own:
                weight = _read(opened.get_slice(stored), parameters[name], name, dtype, device)
                if wide:
                    weight = weight.float()
                path, _, leaf = name.rpartition(".")
                setattr(lm.get_submodule(path), leaf, nn.Parameter(weight, requires_grad=False))


def _read(stored: Any, parameter: Tensor, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns this rank's rows of a weight, or all rows of a weight that is not sharded."""
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
