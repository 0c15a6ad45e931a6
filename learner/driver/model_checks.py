"""What a start checks of the model: tokenizer and chat template, architecture, the files of base and adapters."""

from glob import has_magic
from pathlib import Path

from cluster.reading import Unreadable
from learner.config import RunConfig
from learner.config.learner import LoraConfig
from learner.driver.findings import Findings, PreflightError
from learner.driver.fingerprints import base_name, same_base
from learner.model.adapter_config import AdapterError, follow, read_adapter, read_content, served
from learner.model.reference_config import check_reference
from rollout.architecture import check_architecture, check_length, check_on_cpu, check_shards, check_type
from rollout.data.chat import Chat
from rollout.data.chat_error import ChatError
from rollout.data.model_files import CONFIG, read_json, template_in
from rollout.data.weight_files import WeightsError
from rollout.data.weight_names import check_adapter, check_copy, check_model, sizes_of

TEMPLATE_S = 20.0  # for rendering one conversation, which takes milliseconds


def load_chat(config: RunConfig) -> Chat:
    """The model's tokenizer and chat template, once model, template and lengths are known to go together."""
    data = config.data
    _check_name(config.model.path)
    chat = Chat.load(config.model.source, data.chat_template_kwargs, config.rollout.stop, template=data.chat_template)
    chat.try_template(TEMPLATE_S, ["system", "user"] if config.data.system is not None else ["user"])
    chat.stops(config.rollout.stop)
    _check_context(config, chat.context)
    check_architecture(chat.config, config.model.path, lora=config.learner.mode == "lora")
    check_type(chat.config, config.model.path, config.model.dtype)
    if config.cluster.gpus.generator == 0:
        check_on_cpu(chat.config, config.model.path)
    check_shards(chat.config, config.model.path, config.cluster.shards)
    longest = config.rollout.max_prompt_length + config.rollout.max_completion_length
    check_length(chat.config, config.model.path, longest)
    return chat


def _check_name(path: str) -> None:
    folder = Path(path).expanduser().absolute()
    if has_magic(str(folder)) and folder.is_dir():
        raise PreflightError(
            f"model.path: a folder's path must be without * ? and [, which vLLM takes for a pattern of file names, got "
            f"{folder}; rename it, or give a link to it that has another name"
        )


def _check_context(config: RunConfig, context: int | None) -> None:
    need = config.rollout.max_prompt_length + config.rollout.max_completion_length
    if context is not None and need > context:
        raise PreflightError(
            f"rollout: max_prompt_length + max_completion_length must be at most the model's context of {context} "
            f"tokens, got {need}"
        )


def check_weights(config: RunConfig, *, followed: bool) -> None:
    """Whether the files of base and adapters are whole and hold what they must, of finite numbers. A hub model is
    looked for in the cache alone. followed: whether follow_adapter took adapters and reference; of one that it refused
    all is said."""
    found, model = Findings((WeightsError, ChatError)), config.model
    found.of(check_model, model.source)
    if model.reference is not None and config.learner.mode == "full" and followed:
        found.of(check_model, model.reference, "model.reference")
    for key, folder in adapters_in(config) if followed else ():
        found.of(check_lora, folder, key, model.source)
    found.finish()


def adapters_in(config: RunConfig) -> list[tuple[str, str]]:
    """Setting and folder of each adapter of the base that a run begins with."""
    if config.learner.mode == "full":  # where model.reference is a whole model
        return []
    named = (("model.adapter", config.model.adapter), ("model.reference", config.model.reference))
    return [(key, folder) for key, folder in named if folder is not None]


def check_lora(folder: str, key: str, base: str | None) -> None:
    """Whether the file of a plain LoRA adapter is whole, and of the layers of this base, unless that is None. Raises
    AdapterError, WeightsError, and ChatError: the base is not there."""
    sizes = None if base is None else sizes_of(read_json(base, CONFIG))
    check_adapter(folder, key, read_adapter(folder, key), sizes)


def check_served(folder: str, key: str, base: str | None) -> None:
    """The same of what is served of an adapter's folder as well, where that is a copy under vLLM's names: it must be of
    the same layers. Raises as check_lora."""
    check_lora(folder, key, base)
    copy = served(Path(folder))
    if copy != Path(folder):
        check_lora(str(copy), key, base)
        check_copy(folder, str(copy), key, read_adapter(folder, key), read_adapter(str(copy), key))


def follow_adapter(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """The configuration in which model.adapter fills in what learner.lora leaves open, and a line that says so."""
    if config.model.reference is not None and config.learner.mode == "full":
        check_reference(config.model.reference, config.model.source)
    elif config.model.reference is not None:
        read_adapter(config.model.reference, "model.reference")
    if config.model.adapter is None:
        return config, ()
    lora = follow(config.learner.lora, config.model.adapter)
    open_fields = [name for name in LoraConfig.model_fields if name not in config.learner.lora.model_fields_set]
    followed = ", ".join(f"{name} {getattr(lora, name)}" for name in open_fields)
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"lora": lora})})
    return config, (f"learner.lora follows model.adapter: {followed}",) if followed else ()


def adapter_notes(folder: str | None, key: str, model: str, chat: Chat) -> tuple[str, ...]:
    """Lines about an adapter that may be of another base, or was trained with another chat template. Raises
    AdapterError: its base is here, and is another one; or its chat template cannot be read."""
    if folder is None:
        return ()
    notes, base = [], str(read_content(folder, key).get("base_model_name_or_path") or model)
    if (same := same_base(base, model)) is False:
        raise AdapterError(
            f"{key}: base_model_name_or_path of {folder} is {base_name(base)}, whose weights are not those of "
            f"model.path, {model} (it would make another policy of it); give one of this base, or write model.path "
            "there if it is meant"
        )
    if same is None:
        notes.append(
            f"{key}: {folder} was trained on {base_name(base)} (base_model_name_or_path of its adapter_config.json), "
            f"and model.path is {model}: if that is another base, it makes another policy of it"
        )
    own = _template_in(Path(folder).expanduser(), key)
    if own is not None and chat.has_template and own != str(chat.tokenizer.chat_template or "").strip():
        notes.append(
            f"{key}: {folder} has a chat template of its own, which is not that of {model}, and prompts are written "
            "with the latter; put its chat_template.jinja into the model's folder if the adapter was trained with it"
        )
    return tuple(notes)


def _template_in(folder: Path, key: str) -> str | None:
    try:
        found = template_in(folder)
    except Unreadable as error:
        raise AdapterError(f"{key}: {error}; copy it again, or take it away") from None
    return None if found is None else found.strip()
