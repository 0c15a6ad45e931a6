"""What a start checks of the model: tokenizer and chat template, architecture, the files of base and adapters."""

from learner.config import RunConfig
from learner.config.learner import LoraConfig
from learner.driver.findings import Findings, PreflightError
from learner.model.adapter_config import follow, read_adapter
from learner.model.reference_config import check_reference
from learner.model.weight_files import WeightsError, adapter_weights, model_weights
from rollout.architecture import check_architecture, check_length, check_shards, check_type
from rollout.data.chat import Chat

TEMPLATE_S = 20.0  # for rendering one conversation, which takes milliseconds


def load_chat(config: RunConfig) -> Chat:
    """The model's tokenizer and chat template, once model, template and lengths are known to go together."""
    chat = Chat.load(config.model.source, config.data.chat_template_kwargs, config.rollout.stop)
    chat.try_template(TEMPLATE_S, ["system", "user"] if config.data.system is not None else ["user"])
    chat.stops(config.rollout.stop)
    _check_context(config, chat.context)
    check_architecture(chat.config, config.model.path, lora=config.learner.mode == "lora")
    check_type(chat.config, config.model.path, config.model.dtype)
    check_shards(chat.config, config.model.path, config.cluster.shards)
    longest = config.rollout.max_prompt_length + config.rollout.max_completion_length
    check_length(chat.config, config.model.path, longest)
    return chat


def _check_context(config: RunConfig, context: int | None) -> None:
    need = config.rollout.max_prompt_length + config.rollout.max_completion_length
    if context is not None and need > context:
        raise PreflightError(
            f"rollout: max_prompt_length + max_completion_length must be at most the model's context of {context} "
            f"tokens, got {need}"
        )


def check_weights(config: RunConfig, *, adapters: bool) -> None:
    """Whether the files of base and adapters are whole. A hub model is looked for in the cache alone."""
    found = Findings((WeightsError,))
    found.of(model_weights, config.model.source)
    reference, in_shards = config.model.reference, config.memory.base == "sharded"
    if reference is not None and config.learner.mode == "full" and in_shards:  # read in parts, as the base
        found.of(model_weights, reference, "model.reference")
    if adapters and config.learner.mode == "lora":
        for key, folder in (("model.adapter", config.model.adapter), ("model.reference", config.model.reference)):
            if folder is not None:
                found.of(adapter_weights, folder, key)
    found.finish()


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
