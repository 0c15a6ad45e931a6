"""A tiny model and a trained-looking adapter, once per session."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from examples.random_model import make_tiny_model
from tests.learner.adapters import written_adapter


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="session")
def adapter_path(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rank 8, alpha 16, no weight zero: as a fresh adapter's B is 0, half of its gradients are too."""
    return written_adapter(tiny_path, tmp_path_factory.mktemp("adapter"), seed=1)


@pytest.fixture(scope="session")
def groups(tiny_path: str, adapter_path: str) -> list[pa.Table]:
    from tests.learner import naive, trainers  # here: torch is slow to import

    return trainers.groups_near(naive.load(tiny_path, adapter_path))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the processes of ranks have, with which trainers of this process are compared."""
    import torch  # here: it is slow to import

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """--dry-run without its processes, which import torch and vLLM: the modules that would have run there. They run in
    test_dry_run.py and test_preflight_models.py."""
    tried = []

    class NoTrial:
        def __init__(self, module: str, *_: object) -> None:
            tried.append(module)

        def finish(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr("learner.driver.preflight.Trial", NoTrial)
    return tried
