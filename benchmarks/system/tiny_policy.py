"""A tiny model that plays episodes as it was shown them, made on the spot: so another library's environment is played
by a real policy, sampled by vLLM and trained by the learner, without a download."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from examples.tiny_model import PAD, Recipe, make_model, make_tokenizer, padded, train

Part = tuple[str, bool]
"""A piece of an episode as text, special tokens included, and whether the policy says it."""
RECIPE = Recipe(vocabulary=700, heads=3, layers=2, steps=250, batch=8, learning_rate=4e-3)


def make(
    folder: Path,
    draw: Callable[[random.Random], Sequence[Part]],
    special: Sequence[str],
    marks: Sequence[str],
    template: str,
    end: str,
    recipe: Recipe = RECIPE,
    seed: int = 0,
) -> None:
    """Writes model and tokenizer to folder. draw: one episode. special: tokens that decoding leaves out, of which `end`
    ends a turn; marks: tokens that it keeps. A special token must stand at each border of an episode's parts."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    texts = [text for _ in range(100) for text, _ in draw(rng)]
    tokenizer = make_tokenizer(texts, recipe, [PAD, *special], marks, template)
    tokenizer.eos_token = end
    model = make_model(tokenizer, recipe)

    def row() -> tuple[list[int], list[int]]:
        ids: list[int] = []
        labels: list[int] = []
        for text, own in draw(rng):
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            labels += piece if own else [-100] * len(piece)
        return ids, labels

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield padded([row() for _ in range(recipe.batch)], int(tokenizer.pad_token_id))

    train(model, batches(), recipe, autocast=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
