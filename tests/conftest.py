"""Environment of the test process. It must stand before anything imports torch."""

import os
from pathlib import Path

from rollout.engine_env import required_env

os.environ.update(required_env(cuda=Path("/dev/nvidiactl").exists()))
os.environ["HF_HUB_OFFLINE"] = "1"
