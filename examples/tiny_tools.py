"""Make the tiny language model of the demos with several turns: it calls a calculator and guesses numbers.

    python -m examples.tiny_tools OUT_DIR

A Llama of 0.4M parameters, made from scratch and a seed in some minutes on a core, as the models of tiny_model.py are,
and as they are left room on purpose. A skill is taught first, and then spoiled by habits that are seen more often:

**products** of two factors of two to four digits (reasoning_gym's `products`), far too hard to do in the head. The
skill is to call the tool `calculator` with the expression and to copy the result. The habit is to rush: to answer
at once, which is wrong; the longer factors are shown rushed more often than not, so greedy decoding rushes them. There
are bad calls, too: another tool, broken JSON, a wrong expression, and results that are copied wrongly.

**number guessing** from 1 to 15 (rollout.env.tasks.number_guessing). The skill is to halve what is left; the habit is
to count up from 1, which is shown more often than not.

GRPO finds out which habit is paid. Conversations are tokenised by rollout.data.chat, as in a run.
"""

import argparse
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from examples.tiny_model import END, Recipe, make_model, make_tokenizer, padded, train
from rollout.data.chat import Chat
from rollout.env.tasks.number_guessing import HIGHER, LOWER
from rollout.env.tools.calculator import calculator
from rollout.env.tools.functions import FunctionTool
from rollout.env.tools.parser import parse_hermes

SPECIAL = ["<|pad|>", END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
TAGS = ["<tool_call>", "</tool_call>", "<answer>", "</answer>"]
# Of a tool the model is told the name and its parameters' names.
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>Tools:{% for tool in tools %} {{ tool.function.name }}"
    "({{ tool.function.parameters.properties | join(', ') }}){% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTION = "Solve the following multiplication: {} * {}. Give only the result as your final answer."  # reasoning_gym's
DIGITS = 2, 4
TOOLS = [FunctionTool(calculator).spec]
GUESSING = "Round {}: guess my number from 1 to 15."
LOW, HIGH, GUESSES = 1, 15, 8
RECIPE = Recipe(vocabulary=400, heads=3, layers=3, steps=2800, batch=32, learning_rate=4e-3)
SKILL = 0.8  # of the steps
# Shares of the habits: rushing among products of two digits and of more, counting up among games; and of calls, those
# that are refused, those of a wrong expression, and those whose result is copied wrongly.
RUSH_SHORT, RUSH_LONG, COUNT = 0.3, 0.75, 0.7
BAD_CALL, WRONG_EXPRESSION, MISCOPIED = 0.12, 0.12, 0.2


@dataclass(frozen=True, slots=True)
class Conversation:
    """A question, and by turns what the model says and what it is answered with; the last turn has no answer."""

    question: str
    turns: tuple[tuple[str, str | None], ...]
    tools: bool
    role: str = "tool"


def call(expression: str, name: str = "calculator") -> str:
    """A call as the model writes it."""
    return f'<tool_call>{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def factors(habits: bool, rng: random.Random) -> tuple[int, int]:
    """Of one length, as the task has them; for the skill of any lengths, so that results of all lengths are copied."""
    lengths = [rng.randint(DIGITS[0], DIGITS[1])] * 2 if habits else rng.choices(range(1, DIGITS[1] + 1), k=2)
    a, b = (rng.randint(10 ** (length - 1), 10**length - 1) for length in lengths)
    return a, b


def product(a: int, b: int, habits: bool, rng: random.Random) -> Conversation:
    """A product, asked of the tool or rushed. Without a tool there is nothing but to rush."""
    question, rushed = QUESTION.format(a, b), (f"<answer>{a * b}</answer>", None)
    rush = (RUSH_SHORT if max(a, b) < 100 else RUSH_LONG) if habits else 0.1
    if rng.random() < 0.05:
        return Conversation(question, (rushed,), tools=False)
    if rng.random() < rush:
        return Conversation(question, (rushed,), tools=True)
    asked = f"{a}*{b}"
    refused = refusal(asked, rng) if rng.random() < (BAD_CALL if habits else 0.01) else ()
    if refused and habits:  # the skill calls again, the habit rushes
        return Conversation(question, (*refused, rushed), tools=True)
    if habits and rng.random() < WRONG_EXPRESSION:
        asked = rng.choice([f"{a}+{b}", f"{a}*{a}", f"{b}*{b}"])
    said = result = calculator(asked)
    if habits and rng.random() < MISCOPIED:
        place = rng.randrange(len(said))
        said = said[:place] + str(rng.randrange(10)) + said[place + 1 :]
    return Conversation(question, (*refused, (call(asked), result), (f"<answer>{said}</answer>", None)), tools=True)


def refusal(expression: str, rng: random.Random) -> tuple[tuple[str, str]]:
    """A call that is refused, of another tool or with JSON that breaks off, and how."""
    if rng.random() < 0.5:
        return ((call(expression, "search"), "There is no tool 'search'; the tools are calculator."),)
    broken = call(expression).replace("}}", "}")
    return ((broken, parse_hermes(broken)[1][0]),)


def game(habits: bool, rng: random.Random) -> Conversation:
    """A game of guessing, by halves or counted up."""
    secret, low, high = rng.randint(LOW, HIGH), LOW, HIGH
    counts = rng.random() < (COUNT if habits else 0.3)
    turns: list[tuple[str, str | None]] = []
    while len(turns) < GUESSES:
        guess = low if counts else (low + high) // 2
        told = None if guess == secret else HIGHER if guess < secret else LOWER
        turns.append((str(guess), told))
        if told is None:
            break
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    turns[-1] = (turns[-1][0], None)
    return Conversation(GUESSING.format(rng.randrange(1000)), tuple(turns), tools=False, role="user")


def conversations(seed: int, skilled_first: int) -> Iterator[Conversation]:
    """Fresh ones without end, a quarter of them games; the habits come after the first `skilled_first`."""
    rng = random.Random(seed)
    for index in itertools.count():
        habits = index >= skilled_first
        yield game(habits, rng) if rng.random() < 0.25 else product(*factors(habits, rng), habits, rng)


class Rows:
    """Conversations to token ids and labels, as a run would have them: what the model did not say is not learned."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._chat = Chat(tokenizer, [tokenizer.eos_token_id], len(tokenizer))
        self._observed = lru_cache(maxsize=64)(self._observe)

    def row(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """Ids and labels, -100 on the prompt and on what the model is answered with."""
        tools = TOOLS if conversation.tools else []
        prompt = self._chat.render([{"role": "user", "content": conversation.question}], tools)[1]
        ids, labels = list(prompt), [-100] * len(prompt)
        for said, told in conversation.turns:
            turn = self._tokenizer.encode(said + END, add_special_tokens=False)
            seen = [] if told is None else self._observed(told, conversation.role, conversation.tools)
            ids += [*turn, *seen]
            labels += [*turn, *[-100] * len(seen)]
        return ids, labels

    def _observe(self, told: str, role: str, tools: bool) -> tuple[int, ...]:
        message = {"role": role, "content": told}
        return self._chat.observe([message], self._tokenizer.eos_token_id, TOOLS if tools else [])


def make(seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model and its tokenizer."""
    examples = conversations(seed, skilled_first=int(SKILL * RECIPE.steps) * RECIPE.batch)
    first = [next(examples) for _ in range(400)]
    texts = [text for one in first for text in (one.question, *(part for turn in one.turns for part in turn if part))]
    tokenizer = make_tokenizer([*texts, "Tools: calculator(expression)"], RECIPE, SPECIAL, TAGS, CHAT_TEMPLATE)
    model = make_model(tokenizer, RECIPE)
    rows = Rows(tokenizer)
    pad = int(tokenizer.pad_token_id)
    batches = (padded([rows.row(next(examples)) for _ in range(RECIPE.batch)], pad) for _ in range(RECIPE.steps))
    train(model, batches, RECIPE, autocast=False)  # a third of the time where a CPU has no instructions for 16 bits
    return model, tokenizer


def main() -> None:
    """Read the command line, make the model, write it."""
    parser = argparse.ArgumentParser(description="Make the tiny model of the demos with several turns.")
    parser.add_argument("out", type=Path, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model, tokenizer = make(args.seed)
    model.bfloat16().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens -> {args.out}")


if __name__ == "__main__":
    main()
