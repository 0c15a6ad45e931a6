"""A run goes on only from a checkpoint of the same run: same settings, data, reward functions, loss and base model.

What decides which numbers a run produces must be equal; processes and bytes are free to change. Paths do not count
where the content behind them is compared. What is to be different on purpose is named in resume_allow_changed.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.reading import Unreadable, read_text
from learner.config import RunConfig
from learner.driver.fingerprints import FILE, Fingerprints, differing
from learner.driver.publishing import ADAPTER, learned_in
from learner.model.adapter_config import MODEL
from rewards.secret_values import MASK

DECIDING = ("seed", "max_staleness", "model", "data", "rewards", "env", "rollout", "learner")
FREE = (
    "rollout.workers", "rollout.kv_cache", "rollout.max_num_seqs", "rollout.reward_workers", "rollout.reward_memory",
    "learner.token_budget", "learner.checkpointing", "learner.offload_boundaries", "learner.restarts", "data.eval",
    "env.variables", "env.concurrency", "env.memory",
)  # fmt: skip
BY_CONTENT = (
    "model.path", "model.revision", "model.adapter", "model.reference", "learner.value.start",
    "data.path", "data.split", "data.args", "data.size",
)  # fmt: skip
# The saved weights and optimizer states are made for these.
FIXED = ("model.dtype", "model.base", "learner.mode", "learner.algorithm", "learner.lora", "learner.optimizer.kind")
RANKS = "cluster.learners"  # decides where the states that each saved are in blocks of its own weights
CONTENTS = ("data", "rewards", "loss", "base", "env")
# Settings that may name a file of the user's.
FUNCTIONS = re.compile(r"rewards\.\d+\.use|env\.use|learner\.loss\.ratio")
SHOWN = 40  # letters of a value in a sentence


class ResumeError(ValueError):
    """The checkpoint is not one of this run; the message names what differs."""


def check_allowed(config: RunConfig) -> None:
    """Raises ResumeError if resume_allow_changed names what does not exist, or what cannot change."""
    known = [*CONTENTS, *_deciding(config, by_content=False)]
    for key in config.resume_allow_changed:
        if _within(key, FIXED):
            raise ResumeError(
                f"resume_allow_changed: {key} cannot change, since a checkpoint's weights and optimizer are made for "
                "it; leave it out, and start another run with name= and model.adapter="
            )
        if not any(_within(one, [key]) for one in known):
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see --help for the settings"
            raise ResumeError(
                "resume_allow_changed: must name data, rewards, loss, base or env (their content), or a setting that "
                f"decides a run's numbers, such as learner.learning_rate; got {key}; {hint}"
            )


def check_same_run(config: RunConfig, inputs: Fingerprints, folder: Path) -> list[str]:
    """Compares a run that is about to start with the checkpoint that it would go on from.

    Returns what is different and allowed to be, in words; empty if it is the same run.

    Raises:
        ResumeError: anything else differs; all of it is named, settings with both values.
    """
    then, recorded = _read(folder)
    now, before = (_deciding(one, by_content=recorded is not None) for one in (config, then))
    changes = {
        key: _changed(key, now.get(key), before.get(key))
        for key in dict.fromkeys([*now, *before])
        if not same_value(now.get(key), before.get(key)) and not _hidden(key, before.get(key))
    }
    if recorded is not None:
        changes |= _contents(inputs, recorded)
    fixed = (*FIXED, RANKS)
    allowed = [key for key in changes if _within(key, config.resume_allow_changed) and not _within(key, fixed)]
    refused = [key for key in changes if key not in allowed]
    if refused:
        listed = ", ".join(key for key in refused if not _within(key, fixed))
        last = f", or allow it: resume_allow_changed=[{listed}]" if listed else ""
        raise ResumeError(
            f"resume: {folder} was made with another {', '.join(changes[key] for key in refused)}; give the same "
            f"again, or this run another name= (and {_from(folder.parents[1])} to start from what was learned){last}"
        )
    return [changes[key] for key in allowed]


def _from(run_dir: Path) -> str:
    """The setting that starts another run from what this one has learned."""
    learned = learned_in(run_dir) or run_dir / ADAPTER
    return f"model.{'path' if learned.name == MODEL else 'adapter'}={learned}"


def config_of(folder: Path) -> RunConfig:
    """The settings that a checkpoint was made with. Raises ResumeError."""
    try:
        return RunConfig.model_validate_json(read_text(folder / "config.json"))
    except ValidationError as error:
        raise ResumeError(
            f"resume: {folder} was made by another version of gleaner, whose configuration this one refuses "
            f"({error.errors()[0]['msg']}); give this run another name="
        ) from None
    except (Unreadable, FileNotFoundError) as error:
        raise ResumeError(_unreadable(error)) from None


def _read(folder: Path) -> tuple[RunConfig, Fingerprints | None]:
    """Settings and inputs that a checkpoint was made with; no inputs in one of a version that did not record them."""
    then = config_of(folder)
    try:
        return then, Fingerprints.read(folder / FILE)
    except FileNotFoundError:
        return then, None
    except Unreadable as error:
        raise ResumeError(_unreadable(error)) from None


def _unreadable(error: Exception) -> str:
    return f"resume: {error}; give the folder of another checkpoint, or this run another name="


def _deciding(config: RunConfig, *, by_content: bool) -> dict[str, Any]:
    """Dotted key -> value of the settings that decide; by_content: without the paths whose content is compared."""
    values = config.model_dump(mode="json")
    left_out = [*FREE, *BY_CONTENT] if by_content else FREE
    found = {
        key: value
        for section in DECIDING
        for key, value in leaves(section, values[section])
        if not _within(key, left_out) and not re.fullmatch(r"rewards\.\d+\.env", key)
    }
    if by_content:  # a submitted job's copy of its folder lies elsewhere each time
        found |= {key: Path(str(value)).name for key, value in found.items() if FUNCTIONS.fullmatch(key)}
    if config.learner.mode == "full" and config.learner.optimizer.kind == "adamw_8bit":
        found[RANKS] = config.cluster.learners
    held_out = config.data.eval  # what is held out of the training data is not left to train on
    split = held_out.split if by_content else None  # in the versions before, it was no source of its own
    elsewhere = held_out.path is not None or split is not None
    return found | {"data.eval": 0 if elsewhere or held_out.every == 0 else held_out.size}


def same_value(one: object, other: object) -> bool:
    """As ==, but that nan, which free arguments may hold, is the same as nan."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    return one == other


def leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Dotted keys down to what is no mapping, nor a list of mappings."""
    if isinstance(value, Mapping) and value:
        parts: Any = value.items()
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        parts = enumerate(value)
    else:
        yield key, value
        return
    for name, part in parts:
        yield from leaves(f"{key}.{name}", part)


def _within(key: str, ones: Iterable[str]) -> bool:
    """Whether the key is one of these or lies below one."""
    return any(key == one or key.startswith(f"{one}.") for one in ones)


def _hidden(key: str, before: object) -> bool:
    """Whether it was stored without what is, or once looked like, a secret."""
    return "args" in key.split(".") and isinstance(before, str) and MASK in before


def _changed(key: str, now: object, before: object) -> str:
    if "args" in key.split("."):  # may hold what must not be printed
        return key
    return f"{key} ({_short(before)}, now {_short(now)})"


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _contents(now: Fingerprints, before: Fingerprints) -> dict[str, str]:
    """Which contents differ, and in which of their parts."""
    found = {}
    for name in CONTENTS:
        new, old = getattr(now, name), getattr(before, name)
        parts = [
            f"{part} {old[part]}, now {new[part]}" if part in new and part in old and len(old[part]) < SHOWN else part
            for part in differing(new, old)
        ]
        if parts:
            found[name] = f"content of {name} ({', '.join(parts)})"
    return found
