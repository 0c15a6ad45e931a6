"""Carries out gleaner reward-model train: it trains a reward model on preference pairs. The model is an adapter with a
scalar head s on a frozen base, trained by the loss of Bradley and Terry (1952) as RLHF uses it (Ouyang et al.
2203.02155, equation 1, with K = 2):

    loss = -log sigmoid(s(prompt, chosen) - s(prompt, rejected)), the mean over pairs.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from cluster import machine
from cluster.errors import WrongInput
from learner.batch.micro_batch import Rows, WholeBatch, whole_batches
from learner.config import ModelConfig
from learner.config.settings import AUTO_TOKEN_BUDGET, LearnerConfig, LoraConfig, ScheduleConfig, rate_factor
from learner.model.policy import Policy
from learner.model.roles import ScoredRole
from learner.tools.reward_model import RewardModelRequest
from learner.trainer.float32_products import choose_library
from learner.trainer.memory_limit import OutOfMemory, TokenBudget, device_of
from learner.trainer.optimizer import Updater
from rollout.data import model_files, sources
from rollout.data.chat import Chat
from rollout.data.files import Names, Row
from rollout.data.observation import MARKER, USER
from rollout.data.weight_names import check_model

# Reading preference pairs: rows of prompt, chosen and rejected in TRL's preference format.
#
# Both answers become token ids as a run would have them: the prompt as the policy gets it, then the answer's text and
# the token that ends a turn. So the reward model learns from sequences of the kind that it scores in a run.

Message = dict[str, str]
PAIRS, EVAL = Names("pairs", "--split", others=""), Names("--eval", "--eval-split", others="")


@dataclass(frozen=True, slots=True)
class Pair:
    """A preference pair as token ids."""

    prompt: tuple[int, ...]  # [P]
    chosen: tuple[int, ...]  # [T], with the end token
    rejected: tuple[int, ...]  # [T], with the end token

    @property
    def longest(self) -> int:
        """Tokens of the longer sequence."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def read_pairs(path: str, chat: Chat, split: str | None = None, names: Names = PAIRS) -> list[Pair]:
    """Reads the pairs of a file, a folder or a hub data set. split: the split of the data set; None: train.

    A prompt may be a text or messages; the answers may be texts, messages that follow the prompt, or whole
    conversations, which must begin alike if there is no prompt. The two answers may be equal. Rows without one of them
    are left out, and a line is printed about them.

    Raises WrongInput. names: what messages of rollout.data.sources call the arguments.
    """
    end, pairs = _end(chat), []
    wrong, empty = list[str](), list[str]()
    rows = sources.read(path, split, {}, None, seed=0, names=names)
    for number, row in enumerate(rows, start=1):
        where = f"{path}, row {number}"
        if (lack := _lack(row, where)) is not None:
            empty.append(lack)
            continue
        try:
            pairs.append(_pair(row, chat, end, where))
        except WrongInput as error:
            wrong.append(str(error))
    if 2 * len(empty) >= len(rows):
        wrong = empty + wrong
    if len(wrong) > 1:
        raise WrongInput(f"{wrong[0]}; {len(wrong) - 1} other rows cannot be learned from either")
    if wrong:
        raise WrongInput(wrong[0])
    if empty:
        print(f"{len(empty)} of {len(rows)} rows are left out: {empty[0]}")
    return pairs


def _end(chat: Chat) -> str:
    """Returns the text with which the model ends its turn."""
    if not chat.has_template:
        return str(chat.tokenizer.eos_token or "")
    turn = [USER, {"role": "assistant", "content": MARKER}]
    past = chat.observations.until_stop(chat.observations.render(turn, opened=False))
    return past.partition(MARKER)[2]


def _lack(row: Row, where: str) -> str | None:
    """What is said of a row of which an answer is missing, or empty."""
    missing = [name for name in ("chosen", "rejected") if row.get(name) in (None, "", [])]
    if not missing:
        return None
    return (
        f"pairs: each row must give chosen and rejected, {where} has no {' and no '.join(missing)} (its columns: "
        f"{', '.join(row)}); rename the columns, or take the row out"
    )


def _pair(row: Row, chat: Chat, end: str, where: str) -> Pair:
    prompt = _messages(row.get("prompt") or [], "user", f"prompt of {where}")
    chosen, rejected = (_answer(row, name, prompt, where) for name in ("chosen", "rejected"))
    if not prompt and isinstance(row["chosen"], str):
        raise WrongInput(f"pairs: texts need a prompt beside them, {where} has none; add a column prompt")
    while len(chosen) > 1 and len(rejected) > 1 and chosen[0] == rejected[0]:
        prompt, chosen, rejected = [*prompt, chosen[0]], chosen[1:], rejected[1:]
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if [message["role"] for message in answer] != ["assistant"]:
            roles = ", ".join(message["role"] for message in answer)
            raise WrongInput(
                f"pairs: behind what both have in common must stand one message of role assistant, {name} of {where} "
                f"has the roles {roles}; take the row out"
            )
    if not prompt:
        raise WrongInput(f"pairs: each row must ask something, {where} has nothing before its answers; take it out")
    try:
        _, ids = chat.render(prompt)
    except WrongInput as error:
        raise WrongInput(
            f"pairs: the model must be able to read each prompt, and not that of {where} ({error})"
        ) from None
    answers = (_encoded(chat, f"{answer[0]['content']}{end}") for answer in (chosen, rejected))
    return Pair(ids, *answers)


def _answer(row: Row, name: str, prompt: Sequence[Message], where: str) -> list[Message]:
    """Returns the messages after the prompt. The prompt at the beginning of a whole conversation is dropped, since it
    would be there twice."""
    answer = _messages(row[name], "assistant", f"{name} of {where}")
    if prompt and len(answer) > len(prompt) and answer[: len(prompt)] == list(prompt):
        answer = answer[len(prompt) :]
    if prompt and answer[0]["role"] != "assistant":
        raise WrongInput(
            f"pairs: what follows the prompt must begin with role assistant, or be a conversation that begins with the "
            f"prompt's own messages; {name} of {where} begins with role {answer[0]['role']}; take the row out, or its "
            "prompt"
        )
    return answer


def _encoded(chat: Chat, text: str) -> tuple[int, ...]:
    return tuple(chat.tokenizer.encode(text, add_special_tokens=False))


def _messages(value: Any, role: str, where: str) -> list[Message]:
    """Returns messages; a text becomes a message of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or not all(_is_message(one) for one in value):
        raise WrongInput(
            f"pairs: must be a text or a list of {{role, content}} messages with texts, {where} is {str(value)[:80]!r}"
            "; repair it, or take the row out"
        )
    return [{"role": one["role"], "content": one["content"]} for one in value]


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))


ROLE = "reward"


class Judged(NamedTuple):
    """How the reward model orders some pairs."""

    accuracy: float  # share of pairs whose chosen answer has the higher score
    margin: float  # mean difference of the scores
    loss: float  # mean loss


class PairLearner:
    """Trains the reward model, an adapter of a policy, on pairs.

    policy: a policy with the trained role ROLE; nothing else of it is trained. total_steps: steps of the schedule.

    Attributes:
        adapter: the reward model.
        step: number of updates so far.
    """

    def __init__(
        self, policy: Policy, config: LearnerConfig, budget: TokenBudget, *, dtype: str, total_steps: int
    ) -> None:
        self.adapter = policy.scored[ROLE]
        assert self.adapter.masters is not None
        self._policy, self._masters, self._device = policy, self.adapter.masters, policy.head.device
        self._config, self._budget, self._total_steps = config, budget, total_steps
        self._updater = Updater(list(self._masters.named.values()), config, dtype=dtype, device=self._device)
        self.step = 0

    def learn(self, pairs: Sequence[Pair]) -> Judged:
        """Makes an update on some pairs, and returns how the model ordered them before it.

        Raises WrongInput if a pair does not fit into memory, FloatingPointError if loss or gradient is not finite.
        """
        differences = self._over(pairs, partial(self._gradient, count=len(pairs)))
        judged = _judged(differences)
        rate = self._config.learning_rate * rate_factor(self.step, self._total_steps, self._config.schedule)
        _, done = self._updater.step(rate, loss_is_finite=np.isfinite(judged.loss))
        if not done and not self._updater.may_overflow:
            raise FloatingPointError(
                f"step {self.step + 1}: loss or gradient is not finite; lower --learning-rate, or set --dtype float32"
            )
        self._masters.sync()
        self.step += 1
        return judged

    def judge(self, pairs: Sequence[Pair]) -> Judged:
        """Returns how the model orders some pairs, without an update."""
        with torch.no_grad():
            return _judged(self._over(pairs, self._differences))

    def _over(self, pairs: Sequence[Pair], work: Callable[[Sequence[WholeBatch]], list[Tensor]]) -> Tensor:
        try:
            return torch.cat(self._budget.run(partial(self._plan, pairs), work))
        except OutOfMemory:
            longest = max(pair.longest for pair in pairs)
            raise WrongInput(
                f"--max-length: two answers of {longest} tokens with their prompt must fit in memory, and do not; "
                "lower it, set --checkpointing full or --base nf4, or take a smaller model"
            ) from None

    def _plan(self, pairs: Sequence[Pair], tokens: int) -> list[WholeBatch]:
        """Returns micro-batches of whole pairs, the largest first; the chosen answer is before the rejected one.

        They are padded on a CPU, where attention computes a packed row segment by segment: the segments would be many
        and short.
        """
        pad, packed = self.adapter.pad, self._policy.packed and self._device.type == "cuda"
        chunks = _chunks(sorted(pairs, key=lambda pair: -pair.longest), tokens)
        every = 2 * len(pairs) * max(pair.longest for pair in pairs)  # so that a chunk is not divided
        return [batch for chunk in chunks for batch in whole_batches(_rows(chunk), every, packed=packed, pad=pad)]

    def _gradient(self, batches: Sequence[WholeBatch], count: int) -> list[Tensor]:
        self._masters.clear_gradients()
        found = []
        with self._policy.acting_as(ROLE):
            for batch in batches:
                difference = self._difference(batch)
                loss = _loss(difference).sum() / count
                torch.autograd.backward(self._updater.scale(loss))
                self._masters.collect_gradients()
                found.append(difference.detach())
        return found

    def _differences(self, batches: Sequence[WholeBatch]) -> list[Tensor]:
        with self._policy.acting_as(ROLE):
            return [self._difference(batch) for batch in batches]

    def _difference(self, whole: WholeBatch) -> Float[Tensor, " pairs"]:
        batch, policy = whole.batch.to(self._device), self._policy
        hidden = policy.hidden(batch.ids, batch.positions, batch.layout)
        scores: Tensor = self.adapter.head(hidden[whole.ends.to(self._device)])
        places = torch.from_numpy(np.argsort(whole.rows)).to(self._device)
        chosen, rejected = scores[places].view(-1, 2).unbind(1)
        difference: Tensor = chosen - rejected
        return difference


def _loss(difference: Tensor) -> Tensor:
    """Returns -log sigmoid of the difference of scores."""
    return -F.logsigmoid(difference)


def _judged(differences: Tensor) -> Judged:
    wide = differences.double()
    return Judged(float((wide > 0).double().mean()), float(wide.mean()), float(_loss(wide).mean()))


def _chunks(pairs: Sequence[Pair], tokens: int) -> Iterator[list[Pair]]:
    """Yields neighbouring pairs that have at most `tokens` tokens together when padded; a longer pair comes alone."""
    chunk: list[Pair] = []
    for pair in pairs:
        if chunk and 2 * chunk[0].longest * (len(chunk) + 1) > tokens:
            yield chunk
            chunk = []
        chunk.append(pair)
    if chunk:
        yield chunk


def _rows(pairs: Sequence[Pair]) -> Rows:
    answers = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
    tokens = np.array([token for answer in answers for token in answer], np.int32)
    return Rows(
        rewards=[],
        prompts=[np.array(pair.prompt, np.int32) for pair in pairs for _ in range(2)],
        completions=tokens,
        behavior=np.zeros(len(tokens), np.float32),
        versions=tokens,
        lengths=np.array([len(answer) for answer in answers]),
        truncated=np.zeros(len(answers), np.bool_),
    )


# The command: some pairs are held out, and the model is trained on the others.

LINES = 10  # number of lines of progress
CHANCE = 0.5  # accuracy of random scores


def run(asked: RewardModelRequest) -> int:
    """Carries out the command. Returns the exit code: 0; 2 for an input that is wrong, or too large for the machine."""
    machine.sleeping_threads()
    made = not asked.out.exists()
    model_files.settle([asked.model, asked.pairs, asked.held_out])
    try:
        check_model(asked.model, "--model")
        train, held_out = _data(asked)
        _train(asked, train, held_out)
    except (ValueError, OSError, FloatingPointError) as error:
        if made and asked.out.is_dir() and not any(asked.out.iterdir()):
            asked.out.rmdir()
        told = str(error).splitlines() if isinstance(error, WrongInput) else [" ".join(str(error).split())]
        print("\n".join(f"error: {line}" for line in told), file=sys.stderr)
        return 2
    return 0


def _data(asked: RewardModelRequest) -> tuple[list[Pair], list[Pair]]:
    """Returns (pairs to learn from, held-out pairs), without pairs that are too long."""
    if asked.out.exists() and (not asked.out.is_dir() or any(asked.out.iterdir())):
        raise WrongInput(f"--out: must be a new folder, {asked.out} is there already; give another")
    try:  # the folder is made now, so that a failure is found before the training
        asked.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongInput(
            f"--out: must be a folder that can be made, got {asked.out} ({error.strerror}); give another"
        ) from None
    if asked.eval_split is not None and asked.held_out is None:
        raise WrongInput("--eval-split: is of what --eval names, which is not given; give both")
    chat = Chat.load(asked.model)
    pairs = _usable(read_pairs(asked.pairs, chat, asked.split), asked.max_length)
    if asked.held_out is not None:
        return pairs, _usable(read_pairs(asked.held_out, chat, asked.eval_split, EVAL), asked.max_length)
    prompts = sorted({pair.prompt for pair in pairs})
    chosen = np.random.default_rng(asked.seed).permutation(len(prompts))[: len(prompts) // 10]
    apart = {prompts[i] for i in chosen}  # all pairs of a prompt are held out together, since they are much alike
    train, held_out = ([p for p in pairs if (p.prompt in apart) == away] for away in (False, True))
    if not held_out:
        raise WrongInput(
            f"pairs: must have ten prompts or more, so that some are held out, got {len(prompts)}; give held-out pairs "
            "of their own with --eval"
        )
    return train, held_out


def _usable(pairs: list[Pair], longest: int) -> list[Pair]:
    """Returns the pairs whose answers differ and are short enough, and prints how many others there are."""
    differ = [pair for pair in pairs if pair.chosen != pair.rejected]
    if len(differ) < len(pairs):
        print(f"{len(pairs) - len(differ)} of {len(pairs)} pairs have the same answer twice and are left out")
    kept = [pair for pair in differ if pair.longest <= longest]
    if len(kept) < len(differ):
        print(f"{len(differ) - len(kept)} of {len(pairs)} pairs are longer than {longest} tokens and are left out")
    if not differ:
        raise WrongInput("pairs: must prefer one answer to another, and all have the same answer twice; give others")
    if not kept:
        raise WrongInput(f"--max-length: must leave pairs to learn from, all have more than {longest} tokens; raise it")
    return kept


def _train(asked: RewardModelRequest, train: list[Pair], held_out: list[Pair]) -> None:
    started, steps = time.perf_counter(), asked.epochs * -(-len(train) // asked.batch)
    learner = _learner(asked, steps)
    print(f"{len(train)} pairs to learn from, {len(held_out)} held out, {steps} steps")
    rng = np.random.default_rng(asked.seed)
    for _ in range(asked.epochs):
        order = rng.permutation(len(train))
        for first in range(0, len(train), asked.batch):
            said = learner.learn([train[i] for i in order[first : first + asked.batch]])
            if learner.step % max(steps // LINES, 1) == 0:
                print(f"step {learner.step}/{steps} loss {said.loss:.4f} accuracy {said.accuracy:.3f}")
    after = learner.judge(held_out)
    learner.adapter.save(asked.out, asked.model)
    print(f"held-out accuracy {after.accuracy:.3f}, mean margin {after.margin:.3f}")
    if after.accuracy < CHANCE:
        print("that is worse than chance: are chosen and rejected swapped, here or there?")
    print(f"{asked.out}: use it as rewards: [{{use: 'adapter:{asked.out}'}}] ({time.perf_counter() - started:.0f} s)")


def _learner(asked: RewardModelRequest, steps: int) -> PairLearner:
    on_card = torch.cuda.is_available()
    if not on_card:
        choose_library()
    lora = LoraConfig(rank=asked.rank, alpha=2 * asked.rank)
    schedule = ScheduleConfig(kind="linear")
    config = LearnerConfig(lora=lora, learning_rate=asked.learning_rate, schedule=schedule)
    policy = Policy(
        ModelConfig(path=asked.model, dtype=asked.dtype, base=asked.base),
        lora,
        checkpointing=asked.checkpointing,
        seed=asked.seed,
        device=device_of("cuda" if on_card else "cpu"),
        roles=[ScoredRole(ROLE, None, trained=True, key="--model")],
    )
    budget = TokenBudget(asked.token_budget or AUTO_TOKEN_BUDGET)
    return PairLearner(policy, config, budget, dtype=asked.dtype, total_steps=steps)
