"""peft without bitsandbytes, which it imports wherever that is installed: half a second of each start, though few runs
have 4-bit layers or 8-bit states."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from learner.config import ModelConfig
from rollout.data.model_files import read_json

LIBRARY = "bitsandbytes"


def quiet() -> None:
    """To be called before peft is imported, which imports bitsandbytes: on a CPU that advises an optional 4-bit kernel,
    which nothing here uses."""
    logging.getLogger(LIBRARY).setLevel(logging.ERROR)


def has_4_bit_layers(model: ModelConfig) -> bool:
    """Made from the base, or in its files already. Raises ChatError where the model cannot be read."""
    return model.base == "nf4" or "quantization_config" in read_json(model.source, "config.json")


@contextmanager
def left_out() -> Iterator[None]:
    """Inside this block bitsandbytes is as if it were not installed, and stays so for peft if that is imported here.

    For a process that will have no 4-bit layer. Where one of the two was imported before, nothing changes.
    """
    if LIBRARY in sys.modules or "peft" in sys.modules:
        yield
        return
    sys.modules[LIBRARY] = None  # type: ignore[assignment]  # an import of it fails, and find_spec finds none
    try:
        from peft.import_utils import is_bnb_available

        assert not is_bnb_available()  # peft asks once and keeps the answer
        yield
    finally:
        del sys.modules[LIBRARY]
