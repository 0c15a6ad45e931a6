"""The settings of a plan as a block of a configuration file."""

from cluster.memory.plan import Plan, Wish, Workload, gib

BLOCK = """\
max_staleness: {staleness}
model: {{path: {model}, dtype: {dtype}, base: {base}}}
rollout:
  num_generations: {generations}
  max_prompt_length: {prompt}
  max_completion_length: {completion}
  kv_cache: {kv_bytes}  # bytes, {kv_size}: {sequences} sequences of full length
  kv_cache_dtype: {kv_dtype}
  max_num_seqs: {sequences}
learner:
  algorithm: {algorithm}
  lora: {{rank: {rank}}}
  checkpointing: {checkpointing}
  token_budget: {token_budget}
memory:
  device: {device}  # bytes of one card, {device_size}
  layout: {layout}
  base: {one_base}
cluster:
  gpus: {{generator: {share}, learner: {share}}}
"""


def block(found: Plan, work: Workload, wish: Wish, *, model: str, staleness: int) -> str:
    """YAML that is the plan; what is not of it (name, data, rewards, steps) is left to the user."""
    return BLOCK.format(
        staleness=staleness, model=model, dtype=wish.dtype, base=found.base,
        generations=work.generations, prompt=work.prompt, completion=work.completion,
        kv_bytes=found.kv_bytes, kv_size=gib(found.kv_bytes), sequences=found.sequences,
        kv_dtype="fp8" if wish.kv_dtype == "fp8" else "auto", rank=wish.rank,
        checkpointing=found.checkpointing, token_budget=found.token_budget,
        device=found.device_bytes, device_size=gib(found.device_bytes), layout=found.layout,
        one_base="shared" if wish.shared else "own",
        algorithm="ppo" if wish.value_rank else "grpo",
        share="1" if found.layout == "separate" else "0.5",
    )  # fmt: skip
