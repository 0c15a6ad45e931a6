"""peft without bitsandbytes, in a process that has imported neither."""

import subprocess
import sys

import pytest

CODE = """
import sys
from learner.model.base import left_out
with left_out():
    from learner.trainer.trainer import Trainer
import peft
from torch import nn
wrapped = peft.get_peft_model(nn.Sequential(nn.Linear(2, 2)), peft.LoraConfig(target_modules=["0"]))
print(type(wrapped.base_model.model[0]).__module__, "bitsandbytes" in sys.modules)
from bitsandbytes.optim.adamw import AdamW8bit
print(AdamW8bit.__name__)
"""


@pytest.mark.long
def test_a_learner_without_4_bit_layers_does_not_import_it_and_8_bit_states_still_can() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert run.stdout.splitlines() == ["peft.tuners.lora.layer False", "AdamW8bit"], run.stderr
