"""Environment of the test process. It must stand before anything imports torch."""

import os
from pathlib import Path

import hypothesis

from rollout.vllm.environment import required_env

os.environ.update(required_env(cuda=Path("/dev/nvidiactl").exists()))
os.environ["HF_HUB_OFFLINE"] = "1"

hypothesis.settings.register_profile("gleaner", deadline=None)  # a busy machine must not fail a property
hypothesis.settings.load_profile("gleaner")
# `make mutants`: the same examples every time, and none made smaller, which only a reader needs.
hypothesis.settings.register_profile(
    "mutants",
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
