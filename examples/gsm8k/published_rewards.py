"""The five reward functions of the widely copied GRPO demo on GSM8K (W. Brown, January 2025), by their published
definitions and under their names, for configs/gsm8k_published_full.yaml. They have TRL's signature, as any function
written for its GRPOTrainer.

Texts are to look like this, each tag on a line of its own:
    <reasoning>
    ...
    </reasoning>
    <answer>
    ...
    </answer>
"""

import re
from typing import Any

# No re.DOTALL, as published: of more than one line of reasoning neither pattern matches.
STRICT = re.compile(r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$")
SOFT = re.compile(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>")
PER_CHARACTER = 0.001  # taken off for each that follows the answer

Completions = list[list[dict[str, str]]]


def correctness_reward_func(
    prompts: list[Any], completions: Completions, answer: list[str], **columns: Any
) -> list[float]:
    """2 for exactly the text that follows #### in the data's answer."""
    golds = [text.split("####")[-1].strip() for text in answer]
    return [2.0 if extracted(c) == gold else 0.0 for c, gold in zip(completions, golds, strict=True)]


def int_reward_func(completions: Completions, **columns: Any) -> list[float]:
    """0.5 for an answer of digits alone."""
    return [0.5 if extracted(c).isdigit() else 0.0 for c in completions]


def strict_format_reward_func(completions: Completions, **columns: Any) -> list[float]:
    """0.5 for the form above, to the last line break."""
    return [0.5 if STRICT.match(c[0]["content"]) else 0.0 for c in completions]


def soft_format_reward_func(completions: Completions, **columns: Any) -> list[float]:
    """0.5 for the tags in their order from the first character on."""
    return [0.5 if SOFT.match(c[0]["content"]) else 0.0 for c in completions]


def xmlcount_reward_func(completions: Completions, **columns: Any) -> list[float]:
    """0.125 for each of the four tags that stands there once, with its line breaks; less for what follows the last."""
    return [tags_in(c[0]["content"]) for c in completions]


def extracted(completion: list[dict[str, str]]) -> str:
    """What stands between the last <answer> and the </answer> behind it; without them, the whole text."""
    return completion[0]["content"].split("<answer>")[-1].split("</answer>")[0].strip()


def tags_in(text: str) -> float:
    """Of xmlcount_reward_func, of one text."""
    score = 0.125 * sum(text.count(tag) == 1 for tag in ("<reasoning>\n", "\n</reasoning>\n"))
    if text.count("\n<answer>\n") == 1:
        score += 0.125 - PER_CHARACTER * len(text.split("\n</answer>\n")[-1])
    if text.count("\n</answer>") == 1:
        score += 0.125 - PER_CHARACTER * (len(text.split("\n</answer>")[-1]) - 1)
    return score
