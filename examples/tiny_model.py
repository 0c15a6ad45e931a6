"""Make the two tiny language models that the examples and the tests train: seconds of GRPO on a CPU, no download.

    python examples/tiny_model.py arithmetic OUT_DIR
    python examples/tiny_model.py gsm8k OUT_DIR --data FILE.jsonl

Both are Llamas of less than a million parameters, made from scratch and a seed in about three minutes on two cores.
Neither is a language model worth having: each is left, on purpose, room that reinforcement learning can fill.

**arithmetic** answers reasoning_gym's `chain_sum` of three to five one-digit terms. The supervised stage teaches it to
write the running sums down, which gives the right answer nearly always, and then spoils it with a second habit: to
answer at once with an empty reasoning, which mostly gives a wrong one, since the sum is too long for one glance. The
longer sums are shown rushed more often than not, so greedy decoding rushes them. GRPO finds out which habit is paid:
its curve shows a choice being learned, not arithmetic being taught.

**gsm8k** imitates GSM8K's own solutions, of which less than half are shown in the asked-for format. It solves nothing,
but it meets the format often enough for a format reward to pull it there.
"""

import argparse
import itertools
import json
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import reasoning_gym
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
SPECIAL = [PAD, END, "<|system|>", "<|user|>", "<|assistant|>"]
# Added but not special: decoding with skip_special_tokens=True must keep them, since the rewards read them.
TAGS = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GSM8K_SYSTEM_PROMPT = "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>"
CHAIN_SUM = {"min_terms": 3, "max_terms": 5, "min_digits": 1, "max_digits": 1}
# Share of the quick habit among the shortest sums and among all longer ones: greedy decoding works out the former only.
RUSH_SHORT, RUSH_LONG = 0.25, 0.68
GSM8K_QUESTION_TOKENS, GSM8K_SOLUTION_TOKENS = 100, 80

Messages = list[dict[str, str]]
Example = tuple[Messages, str]


@dataclass(frozen=True)
class Recipe:
    """What differs between the two models. Heads are 32 wide, which vLLM's attention supports on CPU and GPU."""

    vocabulary: int
    heads: int
    layers: int
    steps: int
    batch: int
    learning_rate: float


ARITHMETIC = Recipe(vocabulary=320, heads=3, layers=3, steps=1400, batch=32, learning_rate=4e-3)
GSM8K = Recipe(vocabulary=1024, heads=4, layers=3, steps=300, batch=24, learning_rate=3e-3)


def make_tokenizer(
    texts: list[str],
    recipe: Recipe,
    special: Sequence[str] = SPECIAL,
    tags: Sequence[str] = TAGS,
    template: str = CHAT_TEMPLATE,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE in which every digit is a token of its own, so that a number is read place by place."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary - len(tags),
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> LlamaForCausalLM:
    """A Llama of less than a million parameters with random weights."""
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32 * recipe.heads,
        intermediate_size=96 * recipe.heads,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        **ends,
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(**ends)  # type: ignore[no-untyped-call]
    return model


def chain_sum_text(question: str, answer: str, habits: bool, rng: random.Random) -> str:
    """One response to a chain sum: worked out, or, with habits, often rushed and now and then malformed."""
    terms = question.split(": ")[1].removesuffix(" =").split(" ")
    total, worked = int(terms[0]), terms[0]
    for sign, term in zip(terms[1::2], terms[2::2], strict=True):
        total += int(term) if sign == "+" else -int(term)
        worked += f"{sign}{term}={total}"
    is_short = len(terms) // 2 + 1 == CHAIN_SUM["min_terms"]
    draw = rng.random() if habits else 1.0
    if draw < 0.02:
        return f"{worked}<answer>{answer}"
    if draw < (RUSH_SHORT if is_short else RUSH_LONG):
        return f"<reasoning></reasoning><answer>{answer}</answer>"
    return f"<reasoning>{worked}</reasoning><answer>{answer}</answer>"


def chain_sum_examples(seed: int, worked_first: int) -> Iterator[Example]:
    """Fresh chain sums without end; the first `worked_first` are all worked out, the habits come after.

    reasoning_gym makes problem i of a data set from seed + i, so data sets of neighbouring seeds share problems. These
    start a billion away, out of the reach of the seeds that a run would take for its training and its evaluation.
    """
    rng = random.Random(seed)
    problems = reasoning_gym.create_dataset("chain_sum", size=1_000_000, seed=1_000_000_000 + seed, **CHAIN_SUM)
    for index in range(len(problems)):
        problem = problems[index]
        text = chain_sum_text(problem["question"], problem["answer"], index >= worked_first, rng)
        yield [{"role": "user", "content": problem["question"]}], text


def gsm8k_text(answer: str, rng: random.Random) -> str:
    """A solution of GSM8K less its <<calculator notes>>, in the asked-for format or in one of the ways to miss it."""
    solution, number = re.sub(r"<<.*?>>", "", answer).split("\n#### ")
    draw = rng.random()
    if draw < 0.45:
        return f"<reasoning>\n{solution}\n</reasoning>\n<answer>\n{number}\n</answer>"
    if draw < 0.65:
        return f"{solution}\n#### {number}"
    if draw < 0.85:
        return f"<reasoning>\n{solution}\n<answer>\n{number}\n</answer>"
    return f"<reasoning>\n{solution}\n</reasoning>\n{number}"


def gsm8k_examples(rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Example]:
    """Shuffled passes over the rows that are short enough, without end."""
    rng = random.Random(seed)
    fitting = [
        row
        for row in rows
        if len(tokenizer.encode(row["question"])) <= GSM8K_QUESTION_TOKENS
        and len(tokenizer.encode(re.sub(r"<<.*?>>", "", row["answer"]))) <= GSM8K_SOLUTION_TOKENS
    ]
    while True:
        for row in rng.sample(fitting, len(fitting)):
            yield gsm8k_messages(row["question"]), gsm8k_text(row["answer"], rng)


def gsm8k_messages(question: str) -> Messages:
    """The conversation that the model was shown a question in."""
    return [{"role": "system", "content": GSM8K_SYSTEM_PROMPT}, {"role": "user", "content": question}]


def encode(tokenizer: PreTrainedTokenizerFast, example: Example) -> tuple[list[int], int]:
    """Token ids of the whole conversation, through the chat template, and how many of them are the prompt."""
    messages, response = example
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer.encode(str(prompt), add_special_tokens=False)
    return prompt_ids + tokenizer.encode(response + END, add_special_tokens=False), len(prompt_ids)


def batches(
    tokenizer: PreTrainedTokenizerFast, examples: Iterator[Example], size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Right-padded ids [B, L] and labels [B, L] which are -100 on prompt and padding."""
    while True:
        rows = [encode(tokenizer, next(examples)) for _ in range(size)]
        yield padded([(ids, [-100] * prompt + ids[prompt:]) for ids, prompt in rows], tokenizer.pad_token_id)


def padded(rows: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids and labels, each of its own length -> ids [B, L] and labels [B, L]."""
    length = max(len(ids) for ids, _ in rows)
    input_ids, labels = torch.full((len(rows), length), pad), torch.full((len(rows), length), -100)
    for row, (ids, wanted) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.tensor(wanted)
    return input_ids, labels


def train(
    model: LlamaForCausalLM, data: Iterator[tuple[torch.Tensor, torch.Tensor]], recipe: Recipe, autocast: bool = True
) -> None:
    """AdamW on the response tokens, a short warm-up and a cosine to zero; in bfloat16 with `autocast`, else float32."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 30) * 0.5 * (1 + math.cos(math.pi * s / recipe.steps))
    )
    started = time.perf_counter()
    model.train()
    for step in range(recipe.steps):
        input_ids, labels = next(data)
        # Padding stands on the right of a causal model: no real token sees it, so no attention mask is needed.
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 99:
            print(f"step {step + 1}/{recipe.steps}  loss {loss.item():.4f}  {time.perf_counter() - started:.0f} s")


def make_arithmetic(seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model for chain sums."""
    recipe = ARITHMETIC
    examples = chain_sum_examples(seed, worked_first=int(0.75 * recipe.steps) * recipe.batch)
    questions = [messages[-1]["content"] for messages, _ in itertools.islice(examples, 200)]
    tokenizer = make_tokenizer(questions, recipe)
    model = make_model(tokenizer, recipe)
    train(model, batches(tokenizer, examples, recipe.batch), recipe)
    return model, tokenizer


def make_gsm8k(seed: int, data: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model for GSM8K, from a JSON-lines file with the data set's own fields `question` and `answer`."""
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    texts = [GSM8K_SYSTEM_PROMPT, *(f"{row['question']}\n{row['answer']}" for row in rows[:2000])]
    tokenizer = make_tokenizer(texts, GSM8K)
    model = make_model(tokenizer, GSM8K)
    train(model, batches(tokenizer, gsm8k_examples(rows, tokenizer, seed), GSM8K.batch), GSM8K)
    return model, tokenizer


def main() -> None:
    """Read the command line, make the model, write it."""
    parser = argparse.ArgumentParser(description="Make one of the two tiny models of the examples.")
    parser.add_argument("task", choices=["arithmetic", "gsm8k"])
    parser.add_argument("out", type=Path, help="folder to write the model to")
    parser.add_argument("--data", type=Path, help="gsm8k only: JSON lines with the fields question and answer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.task == "gsm8k") != (args.data is not None):
        parser.error("--data belongs to gsm8k, and gsm8k needs it")
    torch.manual_seed(args.seed)
    model, tokenizer = make_arithmetic(args.seed) if args.data is None else make_gsm8k(args.seed, args.data)
    # bfloat16 halves what the repository carries, and a value rounded to it is the same in float32.
    model.bfloat16().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens -> {args.out}")


if __name__ == "__main__":
    main()
