"""Functions as users of OpenRLHF, open-r1 and reasoning-gym write them. OpenRLHF and open-r1 ship none in a package."""

import re

import reasoning_gym
import torch


def openrlhf(queries, prompts, labels, **kwargs):  # type: ignore[no-untyped-def]
    """OpenRLHF's form, of a batch: a dict of tensors."""
    answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    right = torch.tensor([float(label in answer) for answer, label in zip(answers, labels, strict=True)])
    return {"rewards": right, "scores": right, "extra_logs": {"words": torch.tensor([len(a.split()) for a in answers])}}


def openrlhf_tensor(queries, prompts, labels):  # type: ignore[no-untyped-def]
    """The same, a tensor alone."""
    return torch.tensor([len(q) - len(p) for q, p in zip(queries, prompts, strict=True)], dtype=torch.float32)


def open_r1_tags(completions, **kwargs):  # type: ignore[no-untyped-def]
    """open-r1's form: messages, and every column in kwargs."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(text.count(tag) == 1 for tag in ("<think>\n", "\n</think>\n", "<answer>\n")) / 4 for text in texts]


async def open_r1_lengths(completions, solution, **kwargs):  # type: ignore[no-untyped-def]
    """One that waits for something, as open-r1's of code do."""
    found = [re.search(r"<answer>(.*?)</answer>", completion[0]["content"], re.DOTALL) for completion in completions]
    lengths = [len(completion[0]["content"]) for completion in completions]
    shortest, longest = min(lengths), max(lengths)
    return [
        (0.5 - (length - shortest) / max(longest - shortest, 1)) * (1 if match and match[1].strip() == gold else 0.5)
        for match, gold, length in zip(found, solution, lengths, strict=True)
    ]


def gym(completion: str, answer: str, metadata: dict[str, object]) -> float:
    """reasoning-gym's own scorer, of one completion."""
    task = reasoning_gym.create_dataset("chain_sum", size=1)
    score: float = task.score_answer(completion, {"answer": answer, "metadata": metadata})
    return score
