"""What vLLM knows of weights in 4 bits (quantization="bitsandbytes"): which bytes of a parameter are which matrix, and
their scales.

It quantises each tensor of the checkpoint by itself, as the learner would, and puts the packed bytes of those that it
fuses one after the other. It notes at the parameter where each begins (`bnb_shard_offsets`) and what it multiplies out
by (`bnb_quant_state`, bitsandbytes' QuantState), whose scales it un-nests as it loads: 0.5625 bytes a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Any

from rollout.shared_base.manifest import Quantised, View

_STATES, _OFFSETS = "bnb_quant_state", "bnb_shard_offsets"


def quantised_of(
    parameters: Mapping[str, Any], views: Mapping[str, View]
) -> tuple[dict[str, Quantised], dict[str, str]]:
    """(the matrices among the views that are in 4 bits, why others of them cannot be read), by the checkpoint's name.

    parameters: of vLLM's model, by its names. The scales of a matrix are called as bitsandbytes calls them in a file.
    """
    found: dict[str, Quantised] = {}
    unknown: dict[str, str] = {}
    for name, view in views.items():
        if not hasattr(parameters[view.parameter], _STATES):
            continue
        state = state_of(parameters, view)
        if state is None:
            unknown[name] = f"vLLM multiplies it out together with other rows of {view.parameter}"
        elif state.quant_type != "nf4" or state.nested:
            unknown[name] = f"it is not nf4 with scales in float32 there, but {state.quant_type}, nested={state.nested}"
        else:
            found[name] = Quantised(tuple(state.shape), state.blocksize, f"{name}.absmax")
    return found, unknown


def state_of(parameters: Mapping[str, Any], view: View) -> Any:
    """The QuantState by which vLLM multiplies out exactly these bytes of a parameter; None if there is none."""
    parameter = parameters[view.parameter]
    states, offsets = getattr(parameter, _STATES, {}), getattr(parameter, _OFFSETS, None)
    starts = [] if offsets is None else offsets.tolist()
    size = prod(view.shape)
    for shard, (start, end) in enumerate(pairwise(starts)):
        if (start, end) == (view.offset, view.offset + size) and set(view.strides) == {1}:
            return states[shard]
    return None
