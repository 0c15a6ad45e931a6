"""What an adapter_config.json must say for the adapter to be trained on (model.adapter) or held close to
(model.reference): a plain LoRA adapter. Only the file is read; neither torch nor peft is imported.

PEFT loads more kinds of adapters than are trained and served here. A setting that would then be exported or served as
something else is refused, by its name in the file.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args

from cluster.errors import WrongInput
from cluster.reading import read_mapping
from learner.config.load import why_not
from learner.config.settings import LoraConfig
from rollout.data.model_files import WEIGHTS_FILE, header, split
from rollout.data.weight_names import SCORE

CONFIG_FILE = "adapter_config.json"
PEFT_RANK = 8  # of a file that does not say it
NOTE = "note: "  # what a line of a trial begins with that is no reason to refuse a run
HEAD = SCORE
VLLM_FOLDER = "vllm"  # of the copy under vLLM's names, where it has names of its own
MODEL = "model"  # folder of a whole model: in the learner's part of a checkpoint, and of a run

RANKS = get_args(LoraConfig.model_fields["rank"].annotation)
# Forms of the first weights that leave the base as it is; pissa, olora, corda, loftq and others change it.
INITIAL = (None, True, False, "gaussian", "orthogonal", "eva")
FREE = {
    "r", "lora_alpha", "target_modules", "use_rslora",  # what the adapter is; rslora: alpha / sqrt(r), in PEFT and vLLM
    "lora_dropout", "inference_mode",  # the learner has no dropout, and decides itself what trains
    "base_model_name_or_path", "revision", "task_type", "auto_mapping", "peft_version", "eva_config",
    "megatron_core", "qalora_group_size",  # of forms that are switched on elsewhere
}  # fmt: skip
FIXED = {"peft_type": ("LORA",), "bias": ("none", None), "init_lora_weights": INITIAL}


def base_of(model: str) -> dict[str, str | None]:
    """What PEFT reads of an adapter's base; `model`: ModelConfig.source."""
    name, revision = split(model)
    return {"base_model_name_or_path": name, "revision": revision}


def served(folder: Path) -> Path:
    """Where vLLM finds the adapter of a folder: in the copy under its names, if there is one."""
    copy = folder / VLLM_FOLDER
    return copy if (copy / CONFIG_FILE).is_file() else folder


def read_adapter(folder: str, key: str) -> dict[str, Any]:
    """The content of adapter_config.json of a plain LoRA adapter.

    Args:
        key: the setting that gives the folder, for the message.

    Raises:
        WrongInput: there is none, or it is no plain LoRA adapter.
    """
    content = read_content(folder, key)
    _check_plain(content, Path(folder) / CONFIG_FILE, key)
    return content


def read_scored(folder: str, key: str) -> dict[str, Any]:
    """The same of a plain LoRA adapter with a scalar head: PEFT's sequence classification with one label. `r` is set.

    Raises:
        WrongInput: there is none, or it is something else, such as a head of two outputs.
        WrongInput: its weights are not whole.
    """
    content, file = read_content(folder, key), Path(folder) / CONFIG_FILE
    if content.get("task_type") != "SEQ_CLS":
        raise WrongInput(
            f"{key}: task_type of {file} must be 'SEQ_CLS', got {content.get('task_type')!r}; give an adapter with a "
            "head, as gleaner reward-model train makes one"
        )
    _check_plain({**content, "modules_to_save": None}, file, key)
    if others := set(content.get("modules_to_save") or ()) - {"classifier", "score"}:
        raise WrongInput(
            f"{key}: modules_to_save of {file} must be the head alone, got {', '.join(sorted(others))} too; only the "
            "adapter and its head are kept beside the base"
        )
    if not isinstance(rank := content.get("r", PEFT_RANK), int) or rank < 1:
        raise WrongInput(f"{key}: r of {file} must be a whole number from 1, got {rank!r}; save the adapter again")
    head = header(file.parent / WEIGHTS_FILE, key).get(HEAD)
    if head is None or head.shape[:1] != (1,):
        got = "none" if head is None else f"{head.shape[0] if head.shape else 'no'} outputs"
        raise WrongInput(
            f"{key}: {HEAD} in {file.parent / WEIGHTS_FILE} must be a head of one output, got {got}; train it with "
            "num_labels=1"
        )
    return content | {"r": rank}


def read_content(folder: str, key: str) -> dict[str, Any]:
    """What adapter_config.json holds, whatever kind of adapter it is. Raises WrongInput, which names `key`."""
    file = Path(folder) / CONFIG_FILE
    try:
        there = file.is_file()
    except OSError:  # a name that is too long
        there = False
    if not there:
        raise WrongInput(f"{key}: must be a folder with an {CONFIG_FILE}, got {folder:.200}; give one in PEFT's form")
    try:
        return read_mapping(file)
    except (OSError, WrongInput) as error:
        raise WrongInput(f"{key}: {error}; save the adapter again") from None


def _check_plain(content: Mapping[str, Any], file: Path, key: str) -> None:
    """The kind comes first: what other kinds have beside it is no setting of a LoRA adapter."""
    for name, value in sorted(content.items(), key=lambda item: item[0] != "peft_type"):
        allowed = FIXED.get(name)
        if (value not in allowed) if allowed is not None else (value and name not in FREE):
            wanted = f"be {allowed[0]!r}" if allowed is not None and allowed[0] else "not be set"
            raise WrongInput(f"{key}: {name} of {file} must {wanted}, got {value!r:.200}: {_why(name)}")
    _check_kind(content, file, key)


def _why(name: str) -> str:
    """Reason and next step of an adapter that is refused for this setting."""
    if name == "peft_type":
        return "vLLM serves no other kind of adapter; give one of PEFT's LoraConfig"
    why = why_not(name) or "only plain LoRA adapters are trained and served as they are"
    return f"{why}; merge this one into its base (PEFT's merge_and_unload), or give a plain one"


def _check_kind(content: Mapping[str, Any], file: Path, key: str) -> None:
    if content.get("peft_type") != "LORA":
        raise WrongInput(f"{key}: peft_type of {file} must be 'LORA', got None; give a LoRA adapter")
    targets = content.get("target_modules")
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        raise WrongInput(
            f"{key}: target_modules of {file} must be a list of layers, got {targets!r}; write out their names"
        )
    if not (file.parent / WEIGHTS_FILE).is_file():
        raise WrongInput(f"{key}: {file.parent} must hold {WEIGHTS_FILE}, and does not; save the adapter again")


def follow(lora: LoraConfig, folder: str) -> LoraConfig:
    """`lora` with what it leaves open taken from the adapter that training starts from (model.adapter).

    Raises:
        WrongInput: the adapter is none to start from, or contradicts what `lora` sets.
    """
    content = read_adapter(folder, "model.adapter")
    leaves = sorted({name.rpartition(".")[2] for name in content["target_modules"]})
    found = {"rank": content.get("r"), "alpha": content.get("lora_alpha"), "targets": leaves}
    if found["rank"] not in RANKS:
        raise WrongInput(
            f"model.adapter: r of {folder} must be one of {', '.join(map(str, RANKS))}, got "
            f"{found['rank']}; train another adapter"
        )
    check_same(lora, content, folder, lora.model_fields_set)
    return LoraConfig.model_validate(found | {name: getattr(lora, name) for name in lora.model_fields_set})


def check_same(lora: LoraConfig, content: Mapping[str, Any], folder: str, fields: Collection[str]) -> None:
    """Raises WrongInput if the adapter's rank, alpha or targets are not those of `lora`.

    Args:
        content: of the folder's adapter_config.json.
        fields: those of `lora` that count. Targets all-linear are compared once the model is there.
    """
    leaves = sorted({name.rpartition(".")[2] for name in content["target_modules"]})
    wanted = lora.targets if lora.targets == "all-linear" else sorted({n.rpartition(".")[2] for n in lora.targets})
    rows = {
        "rank": ("r", lora.rank, content.get("r")),
        "alpha": ("lora_alpha", lora.alpha, content.get("lora_alpha")),
        "targets": ("target_modules", wanted, leaves if wanted != "all-linear" else wanted),
    }
    for field, (name, value, found) in rows.items():
        if field in fields and found != value:
            raise WrongInput(
                f"model.adapter: {name} of {folder} must be {value!r} as learner.lora.{field} says, got {found!r}; "
                f"leave learner.lora.{field} out to take the adapter's"
            )


# Checks model.reference of a run that trains the whole model: it must be a whole model of the same architecture.
#
# Only configurations are read, no weights.

# Settings of a transformers config that do not change what the learner computes. Dropout and the ids of special tokens
# do not either; they are recognised by their names below.
REFERENCE_FREE = {"_name_or_path", "transformers_version", "architectures", "dtype", "use_cache", "initializer_range"}


def check_reference(reference: str, path: str) -> None:
    """Raises WrongInput if `reference` is no whole model, or computes otherwise than that of `path`."""
    from transformers import AutoConfig  # here: slow to import, and few runs use it

    if (Path(reference) / CONFIG_FILE).exists():
        raise WrongInput(
            f"model.reference: must be a whole model, as what is trained is (learner.mode=full), {reference} is an "
            "adapter; give a model's folder, or null for what training starts from"
        )
    try:
        theirs = AutoConfig.from_pretrained(reference, trust_remote_code=False).to_dict()
    except (OSError, ValueError) as error:
        raise WrongInput(
            f"model.reference: must be a model's folder or hub name, got {reference} ({str(error).splitlines()[0]}); "
            "give another, or null for what training starts from"
        ) from None
    model, revision = split(path)
    ours = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False).to_dict()
    for name in sorted((theirs.keys() | ours.keys()) - REFERENCE_FREE):
        if theirs.get(name) != ours.get(name) and "drop" not in name and not name.endswith("_token_id"):
            raise WrongInput(
                f"model.reference: must be a whole model of the architecture of model.path, {name} of {reference} is "
                f"{theirs.get(name)!r}, not {ours.get(name)!r}; give another, or null for what training starts from"
            )
