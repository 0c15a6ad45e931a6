"""Environment of the test process. It must stand before anything imports torch."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from jaxtyping import install_import_hook
from xdist.scheduler import LoadScopeScheduling

from learner.driver.process import ENDS
from rollout.vllm.environment import required_env

os.environ.update(required_env(cuda=Path("/dev/nvidiactl").exists()))
os.environ["HF_HUB_OFFLINE"] = "1"

# Signals that are ignored here, under nohup or as a job in the background, would be ignored by every run that a test
# starts; one with a handler is its default again in a new program.
for number in ENDS:
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else lambda *_: None)

# The shapes that annotations name are checked in every call; not in mutants, whose wrappers have no annotations.
if "MUTANT_UNDER_TEST" not in os.environ:
    checked = ["learner.algo.loss", "learner.algo.loss", "learner.batch.micro_batch", "learner.model.logprob"]
    install_import_hook(checked, "beartype.beartype")

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


@pytest.fixture(autouse=True)
def own_products() -> Iterator[None]:
    """The library of float32 products, which the learner and a replay choose for their process, and which has a say in
    what memory a product takes, is after each test that of a fresh process."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].backends.mkldnn.matmul.fp32_precision = "none"


PROCESSES = (
    "tests/documented/",
    "tests/flow/",
    "tests/learner/ranks/",
    "tests/nodes/",
    "tests/recipes/",
    "tests/system/",
)


DRIVER = ("tests/learner/api/", "tests/learner/driver/", "tests/learner/tools/")
SHARES = ("processes", "vLLM", "the learner", "the driver", "the rest", "the repository")  # the longest first


def share_of(nodeid: str) -> str:
    if nodeid.startswith(PROCESSES):
        return "processes"
    if nodeid.startswith("tests/rollout/vllm/"):
        return "vLLM"
    if nodeid.startswith(DRIVER):
        return "the driver"
    if nodeid.startswith("tests/learner/"):
        return "the learner"
    return "the repository" if nodeid.startswith("tests/test_") else "the rest"


class InShares(LoadScopeScheduling):  # type: ignore[misc]
    """Six shares for three processes (`-n 3 --dist loadscope`), of which the first to be free takes the next. Runs and
    ranks wait for processes a good part of the time. Each share keeps the order of one process, in which what a test
    leaves behind is known to do no harm.
    """

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> InShares:
    config.option.loadscopereorder = False  # which would begin with the share of the most tests
    return InShares(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mutant = os.environ.get("MUTANT_UNDER_TEST", "")
    if "__mutmut_" in mutant:
        likeliest_first(items, mutant)
    elif "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: SHARES.index(share_of(item.nodeid)))


def likeliest_first(items: list[pytest.Item], mutant: str) -> None:
    """Tests of the mutated file's own test file, then the others, each from the quickest to the slowest: a mutant ends
    with the first test that fails. mutmut gives them in the order of a set."""
    own = f"test_{mutant.rpartition('.')[0].rpartition('.')[2]}.py"
    told = Path(__file__).parents[1] / "mutmut-stats.json"  # mutants/ is a copy of the repository
    seconds: dict[str, float] = json.loads(told.read_text())["duration_by_test"]
    items.sort(key=lambda item: (item.path.name != own, seconds.get(item.nodeid.removeprefix("mutants/"), 0.0)))
