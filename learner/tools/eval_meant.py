"""Translates the options of gleaner eval into a configuration, and an adapter on its model."""

import json
import math
import os
from pathlib import Path

from cluster.errors import WrongInput
from cluster.reading import read_yaml
from learner.config import RunConfig, load
from learner.driver.checkpoint import ADAPTER, learned_in
from learner.model.adapter_config import MODEL
from learner.tools.eval_command import EvalRequest
from rollout.config import OF_ITS_PATH, DataConfig

NO_REVISION = "model.revision=null"  # the revision in a configuration is not that of another model


def of_other_data() -> list[str]:
    """Returns overrides that reset how a configuration's own data are read, since --data names other data. Overrides of
    the user must come after them."""
    defaults = {name: DataConfig.model_fields[name].get_default(call_default_factory=True) for name in OF_ITS_PATH}
    return [f"data.{name}={json.dumps(default)}" for name, default in defaults.items()]


def meant(asked: EvalRequest) -> tuple[RunConfig, str | None]:
    """Returns the configuration, and the adapter on its model. Raises WrongInput for wrong options, also for those
    that are needed only at the end."""
    found = _configured(asked)
    _check_save(asked.save)
    if not math.isfinite(asked.threshold):
        raise WrongInput(f"--threshold: must be a number, got {asked.threshold}")
    return found


def _configured(asked: EvalRequest) -> tuple[RunConfig, str | None]:
    if asked.run_folder is not None and asked.config is not None:
        raise WrongInput("--run: does not go with --config, which it has in its folder; give one of them")
    if asked.split is not None and asked.data is None:
        raise WrongInput(
            "--split: is of --data; name the source with --data as well, or for other held-out problems of a "
            f"configuration give data.eval.split={asked.split}"
        )
    folder, file, changed, adapter = asked.run_folder, asked.config, _overrides(asked), asked.adapter
    if folder is not None:
        file = str(folder / "config.yaml")
        if not Path(file).exists():
            raise WrongInput(f"--run: must be a run folder such as runs/demo-seed0, got {folder}; check the path")
        learned = learned_in(folder)
        if asked.model is None and learned == folder / MODEL:
            changed[:0] = [f"model.path={learned}", NO_REVISION]
        elif asked.model is None and adapter is None:
            adapter = _adapter(learned, folder)
    if file is None:
        _check_named(asked)
    elif asked.model is not None and not _names(file, asked.model):
        changed[:0] = [NO_REVISION]
    return load.load_config(file, changed), adapter


def _names(file: str | Path, model: str) -> bool:
    """Whether `model` is the model of a configuration file."""
    own = read_yaml(Path(file)).get("model")
    return isinstance(own, dict) and own.get("path") == model


def _check_named(asked: EvalRequest) -> None:
    """Raises WrongInput if model, data or rewards are not given, where there is no configuration file."""
    wanted = {"--model": ("model", asked.model), "--data": ("data", asked.data), "--reward": ("rewards", asked.reward)}
    keys = {override.removeprefix("--").replace("=", ".").partition(".")[0] for override in asked.overrides or []}
    if missing := [name for name, (key, value) in wanted.items() if not value and key not in keys]:
        raise WrongInput(
            f"{', '.join(missing)}: required where no configuration names it; give one with --config FILE or --run DIR"
        )


def _adapter(learned: Path | None, folder: Path) -> str:
    if learned is None:
        raise WrongInput(
            f"--run: {folder} has neither {ADAPTER}/ nor {MODEL}/, so it has no checkpoint yet; for its base give "
            f"--config {folder / 'config.yaml'}"
        )
    return str(learned)


def _overrides(asked: EvalRequest) -> list[str]:
    """Returns the options as overrides, followed by the overrides that the user gave."""
    given = {
        "model.path": asked.model, "data.path": asked.data, "data.split": asked.split, "data.prompt": asked.prompt,
        "rollout.temperature": asked.temperature,
    }  # fmt: skip
    changed = [f"{key}={value}" for key, value in given.items() if value is not None]
    if asked.reward:
        changed.append(f"rewards={json.dumps([{'use': use} for use in asked.reward])}")
    if asked.data is not None:
        changed = [*of_other_data(), f"data.size={asked.limit or 'null'}", *changed]
    return [*changed, *(asked.overrides or [])]


def _check_save(file: Path | None) -> None:
    if file is None:
        return
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise WrongInput(f"--save: must be a file in a folder that is there and writable, got {file}")
    if file.suffix != ".parquet":
        raise WrongInput(f"--save: writes Parquet, got {file}; give a name that ends in .parquet")
