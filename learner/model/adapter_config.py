"""Checks of adapters and references before a run: an adapter (model.adapter, model.reference, a reward model) must be a
plain LoRA adapter, and the reference of a model trained as a whole must have its architecture. Only
adapter_config.json, a model's configuration and headers of weight files are read; neither torch nor peft is imported.

PEFT loads more kinds of adapters than gleaner trains and vLLM serves. A setting in the file with which the exported or
served adapter would be a different one is refused by its name.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args

from cluster.errors import WrongInput
from cluster.memory.shape import EXPERTS
from cluster.reading import read_mapping
from learner.config.load import why_not
from learner.config.settings import LoraConfig
from rollout.data.model_files import WEIGHTS_FILE, header, split
from rollout.data.weight_names import SCORE

CONFIG_FILE = "adapter_config.json"
PEFT_RANK = 8  # PEFT's rank of an adapter whose file does not say it
NOTE = "note: "  # prefix of a line of learner.model.trial that is no reason to refuse a run
HEAD = SCORE
VLLM_FOLDER = "vllm"  # folder of a copy of the adapter as vLLM takes it, where names or the order of rows differ
MODEL = "model"  # folder of a whole model: in the learner's part of a checkpoint, and in a run folder

RANKS = get_args(LoraConfig.model_fields["rank"].annotation)
# Initialisations that leave the base as it is; pissa, olora, corda, loftq and others change it.
INITIAL = (None, True, False, "gaussian", "orthogonal", "eva")
FREE = {
    "r", "lora_alpha", "target_modules", "target_parameters", "use_rslora",  # rslora: alpha / sqrt(r), in PEFT and vLLM
    "exclude_modules",  # layers that have no adapter; the file's names are compared with the model's in any case
    "lora_dropout", "inference_mode",  # the learner has no dropout, and decides by itself which weights train
    "base_model_name_or_path", "revision", "task_type", "auto_mapping", "peft_version", "eva_config",
    "megatron_core", "qalora_group_size",  # these two have an effect only with settings that are refused
}  # fmt: skip
PARAMETERS = ["experts.down_proj", "experts.gate_up_proj"]  # ends of the names of what EXPERTS stands for
FIXED = {"peft_type": ("LORA",), "bias": ("none", None), "init_lora_weights": INITIAL}


def base_of(model: str) -> dict[str, str | None]:
    """Returns the entries of adapter_config.json that name the base. model: ModelConfig.source."""
    name, revision = split(model)
    return {"base_model_name_or_path": name, "revision": revision}


def served(folder: Path) -> Path:
    """Returns the folder from which vLLM loads an adapter: the copy in VLLM_FOLDER if there is one, else
    `folder`."""
    copy = folder / VLLM_FOLDER
    return copy if (copy / CONFIG_FILE).is_file() else folder


def read_adapter(folder: str, key: str) -> dict[str, Any]:
    """Returns the content of adapter_config.json of a plain LoRA adapter.

    Args:
        key: the setting that gives the folder, for the message.

    Raises:
        WrongInput: the folder has no adapter_config.json, or is not a plain LoRA adapter.
    """
    content = read_content(folder, key)
    _check_plain(content, Path(folder) / CONFIG_FILE, key)
    return content


def targets_of(content: Mapping[str, Any]) -> list[str]:
    """Returns what the adapter of an adapter_config.json changes, sorted: the last parts of layers' names, and EXPERTS
    if it has the experts' parameters. That they are those of PARAMETERS is checked before (read_adapter)."""
    leaves = {str(name).rpartition(".")[2] for name in content["target_modules"] or ()}
    return sorted(leaves | ({EXPERTS} if content.get("target_parameters") else set()))


def read_scored(folder: str, key: str) -> dict[str, Any]:
    """Returns the content of adapter_config.json of a plain LoRA adapter with a scalar head: PEFT's sequence
    classification with one label. `r` is always set.

    Raises:
        WrongInput: the folder has no such adapter (but, for example, a head of two outputs), or its weights are not
            complete.
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
    """Returns the content of adapter_config.json of any kind of adapter. Raises WrongInput, which names `key`."""
    file = Path(folder) / CONFIG_FILE
    try:
        there = file.is_file()
    except OSError:  # the name is too long
        there = False
    if not there:
        raise WrongInput(f"{key}: must be a folder with an {CONFIG_FILE}, got {folder:.200}; give one in PEFT's form")
    try:
        return read_mapping(file)
    except (OSError, WrongInput) as error:
        raise WrongInput(f"{key}: {error}; save the adapter again") from None


def _check_plain(content: Mapping[str, Any], file: Path, key: str) -> None:
    """Raises WrongInput if a setting is not that of a plain LoRA adapter. The kind is checked first, since the settings
    of other kinds mean nothing for a LoRA adapter."""
    for name, value in sorted(content.items(), key=lambda item: item[0] != "peft_type"):
        allowed = FIXED.get(name)
        if (value not in allowed) if allowed is not None else (value and name not in FREE):
            wanted = f"be {allowed[0]!r}" if allowed is not None and allowed[0] else "not be set"
            raise WrongInput(f"{key}: {name} of {file} must {wanted}, got {value!r:.200}: {_why(name)}")
    _check_kind(content, file, key)


def _why(name: str) -> str:
    """Returns why an adapter with this setting is refused, and what to do."""
    if name == "peft_type":
        return "vLLM serves no other kind of adapter; give one of PEFT's LoraConfig"
    why = why_not(name) or "only plain LoRA adapters are trained and served as they are"
    return f"{why}; merge this one into its base (PEFT's merge_and_unload), or give a plain one"


def _check_kind(content: Mapping[str, Any], file: Path, key: str) -> None:
    if content.get("peft_type") != "LORA":
        raise WrongInput(f"{key}: peft_type of {file} must be 'LORA', got None; give a LoRA adapter")
    targets, parameters = content.get("target_modules"), content.get("target_parameters")
    if parameters and (
        not isinstance(parameters, list)
        or sorted(".".join(str(name).split(".")[-2:]) for name in parameters) != PARAMETERS
    ):
        raise WrongInput(
            f"{key}: target_parameters of {file} must be those of routed experts, {' and '.join(PARAMETERS)}, got "
            f"{parameters!r:.200}; merge this one into its base (PEFT's merge_and_unload), or give another"
        )
    if parameters and not targets:
        targets = [EXPERTS]
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        raise WrongInput(
            f"{key}: target_modules of {file} must be a list of layers, got {targets!r}; write out their names"
        )
    if not (file.parent / WEIGHTS_FILE).is_file():
        raise WrongInput(f"{key}: {file.parent} must hold {WEIGHTS_FILE}, and does not; save the adapter again")


def follow(lora: LoraConfig, folder: str) -> LoraConfig:
    """Returns `lora` with the fields that are not set taken from the adapter that training starts from (model.adapter).

    Raises:
        WrongInput: training cannot start from the adapter, or it contradicts a field that is set.
    """
    content = read_adapter(folder, "model.adapter")
    found = {"rank": content.get("r"), "alpha": content.get("lora_alpha"), "targets": targets_of(content)}
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
        content: the content of the folder's adapter_config.json.
        fields: the fields of `lora` to compare. Targets all-linear are compared later (learner.model.lora), when the
            model is there.
    """
    leaves = targets_of(content)
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


# Settings of a transformers config that do not change what the learner computes. Dropout and the ids of special tokens
# do not change it either; `check_reference` recognises them by their names.
REFERENCE_FREE = {"_name_or_path", "transformers_version", "architectures", "dtype", "use_cache", "initializer_range"}


def check_reference(reference: str, path: str) -> None:
    """Raises WrongInput if model.reference, in a run that trains the whole model `path`, is not a whole model of the
    same architecture. Only configurations are read, no weights."""
    from transformers import AutoConfig  # imported here: it is slow, and few runs use it

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
