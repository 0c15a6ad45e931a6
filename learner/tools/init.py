"""gleaner init: the files that a first run needs, to be read and changed."""

import json
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from cluster.files import writing
from learner.tools.init_files import CONFIG, REWARD, ROWS

DEMO = Path(__file__).parents[2] / "examples" / "tiny-arithmetic"
DEMO_SETTINGS = {"dtype": "float32", "prompt": 64, "completion": 64, "kv_cache": "64MiB", "rate": "1e-4"}
SETTINGS = {"dtype": "bfloat16", "prompt": 256, "completion": 256, "kv_cache": "auto", "rate": "2e-5"}


class InitError(ValueError):
    """The files cannot be written; one sentence says why."""


def write(folder: Path, model: str | None) -> str:
    """Writes config.yaml, my_rewards.py and data.jsonl; what to do next. Raises InitError, before anything is written
    where a file is there already."""
    if model is not None and Path(model).is_dir():  # which `model` would not be from inside of the folder
        model = str(Path(model).resolve())
    chosen = {"model": json.dumps(model or str(_demo())), **(SETTINGS if model else DEMO_SETTINGS)}
    files = {
        "config.yaml": CONFIG.format(**chosen),
        "my_rewards.py": REWARD,
        "data.jsonl": "".join(f"{json.dumps(row)}\n" for row in ROWS),
    }
    if there := [name for name in files if (folder / name).exists()]:
        raise InitError(f"FOLDER: nothing is overwritten, and {folder} holds {', '.join(there)}; give another folder")
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (folder / name).write_text(text)
    except OSError as error:
        raise InitError(f"FOLDER: {error.filename} cannot be written ({error.strerror}); give another") from None
    inside = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    return (
        f"wrote {', '.join(files)} in {folder.resolve()}\n"
        f"check:  {inside}gleaner train --config config.yaml --dry-run\n"
        f"train:  {inside}gleaner train --config config.yaml"
    )


def _demo() -> Path:
    """The folder of the demo's model: the repository's, or the one that the wheel has brought."""
    if DEMO.is_dir():
        return DEMO
    try:
        installed = [file for file in files("gleaner-rl") or [] if file.match(f"{DEMO.name}/config.json")]
    except PackageNotFoundError:
        installed = []
    if not installed:
        raise InitError(f"--model: the demo's model is not at {DEMO}; name a model")
    return Path(str(installed[0].locate())).resolve().parent
