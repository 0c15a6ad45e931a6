"""Groups of trajectories by a whole rollout worker: real tokenizer, template, reward and environment processes, and an
engine that samples what it is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.errors import WrongInput
from learner.batch.micro_batch import read
from rewards.config import RewardConfig
from rollout.data.chat import Chat
from rollout.engine import EngineSettings
from rollout.env.config import EnvConfig
from rollout.env.play import ChatDialogue
from rollout.env.rollouts import EnvSettings
from rollout.env.trajectory import Limits
from rollout.fakes import FakeEngine
from rollout.schema import Problem, asked_of, parts_of
from rollout.types import Adapter, Completion, Sampling
from rollout.worker import RolloutWorker, WorkerSpec

MODEL = str(Path(__file__).parents[3] / "examples" / "tiny-arithmetic")
FAULTY = Path(__file__).with_name("faulty.py")
CHAT = Chat.load(MODEL)
PROBLEM = Problem("train-3", ({"role": "user", "content": "1 + 2"},), {"answer": "3"}, (1, 5), 3, 0)
REWARDS = """
def said(completions, answer, **columns):
    texts = ["".join(m["content"] for m in c if m["role"] == "assistant") for c in completions]
    return [float(text.count(a)) for text, a in zip(texts, answer)]
"""
Sample = Callable[[Sequence[int], Sampling], list[int]]


class Told(FakeEngine):
    """Samples what a function says, one token at a time as far as anybody can tell."""

    def __init__(self, sample: Sample) -> None:
        super().__init__(len(CHAT.tokenizer))
        self._sample = sample
        self.asked: list[tuple[list[int], Sampling]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[Completion]:
        self.asked.append((list(prompt_ids), sampling))
        ids = self._sample(prompt_ids, sampling)
        finish = "stop" if len(ids) <= sampling.max_tokens else "length"
        ids = ids[: sampling.max_tokens]
        return [
            Completion(
                np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), finish, np.full(len(ids), 3, np.int32)
            )
        ]


def spec(folder: Path, wrong: str = "", sample: Sample | None = None, **env: Any) -> WorkerSpec:
    (folder / "mine.py").write_text(REWARDS)
    settings = EngineSettings(
        model=MODEL, dtype="float32", max_model_len=512, kv_cache_bytes=1 << 20, max_num_seqs=8, max_lora_rank=8,
        adapter_window=2, seed=0,
    )  # fmt: skip
    own: dict[str, Any] = {"use": f"{FAULTY}:Plain", "args": {"wrong": wrong}, "step_timeout_s": 2}
    config = EnvConfig(**own | env)
    played = EnvSettings(config, Limits(64, 400, 8, 60), concurrency=3, seed=11)
    engine = Told(sample or (lambda ids, _: [*CHAT.tokenizer.encode("3 or 3", add_special_tokens=False), STOP]))
    return WorkerSpec(
        0, "run", settings, (RewardConfig(use=f"{folder}/mine.py:said"),), 1, 2**30, lambda _: engine, played
    )


def alone(made: WorkerSpec) -> WorkerSpec:
    """Without reward functions."""
    assert made.env is not None
    return replace(made, rewards=(), env=replace(made.env, alone=True))


STOP = CHAT.stop_ids[0]


@pytest.fixture
async def started(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    workers = []

    async def start(*args: Any, **how: Any) -> RolloutWorker:
        workers.append(RolloutWorker(spec(tmp_path, *args, **how)))
        await workers[-1].take_policy(Adapter.build(3, b"three", {}))
        return workers[-1]

    yield start
    for worker in workers:
        await worker.close()


SAMPLING = Sampling(n=5, max_tokens=400, seed=70)


async def test_a_group_of_trajectories_holds_all_that_was_sampled_and_answered(started: Any) -> None:
    worker = await started()
    table = await worker.rollout(PROBLEM, SAMPLING, 2)
    row = table.to_pylist()[4]
    turn = [*CHAT.tokenizer.encode("3 or 3", add_special_tokens=False), STOP]
    seen = list(CHAT.observe([{"role": "user", "content": "go on"}], STOP))
    assert row["completion_ids"] == [*turn, *seen, *turn, *seen, *turn]
    opening = [{"role": "user", "content": "begin"}]  # the environment's, not the data's
    assert asked_of(row["problem"]).messages == opening
    one, other = [True] * len(turn), [False] * len(seen)
    assert row["loss_mask"] == [*one, *other, *one, *other, *one]
    assert row["prompt_ids"] == list(CHAT.render([{"role": "user", "content": "begin"}])[1])
    assert [turn["reward"] for turn in row["turns"]] == [0.5] * 3
    assert [message["role"] for message in json.loads(row["messages"])] == ["assistant", "user"] * 2 + ["assistant"]
    assert parts_of(table) == [{"env": 1.5, "said": 6.0}] * 5
    assert (row["reward"], row["reward_status"], row["finish_reason"]) == (7.5, "ok", "done")
    rows = read([table])
    assert rows.counts.tolist() == [3 * len(turn)] * 5
    seeds = [sampling.seed for _, sampling in worker.engine.asked]
    assert len(set(seeds)) == len(seeds) == 15  # of each turn of each trajectory
    again = await worker.rollout(PROBLEM, SAMPLING, 2)
    assert again.column("completion_ids").equals(table.column("completion_ids"))
    assert sorted(sampling.seed for _, sampling in worker.engine.asked[15:]) == sorted(seeds)


async def test_a_watch_beside_the_environment_s_own_rewards_leaves_them_as_they_are(tmp_path: Path) -> None:
    """As beside a run without reward functions, also where the environment has given nothing."""
    rewards, found = (RewardConfig(use=f"{tmp_path}/mine.py:said", watch=True),), []
    for sample in (None, lambda ids, _: [CHAT.tokenizer.encode("3")[-1]] * 500):
        for watches in ((), rewards):
            worker = RolloutWorker(replace(alone(spec(tmp_path, sample=sample)), rewards=watches))
            await worker.take_policy(Adapter.build(3, b"three", {}))
            table = await worker.rollout(PROBLEM, replace(SAMPLING, n=2), 0)
            await worker.close()
            assert table is not None
            found.append([table.column(name).to_pylist() for name in ("reward", "reward_status", "reward_error")])
            assert all(("said" in parts) == bool(watches) for parts in parts_of(table))
    assert found[0] == found[1] == [[1.5] * 2, ["ok"] * 2, [None] * 2]
    assert found[2] == found[3] == [[0.0] * 2, ["ok"] * 2, [None] * 2]


async def test_to_ramble_is_not_free_where_the_environment_alone_rewards(tmp_path: Path) -> None:
    """Cut within its first turn, a trajectory was never answered, so no turn gave a reward."""
    made = spec(tmp_path, sample=lambda ids, _: [CHAT.tokenizer.encode("3")[-1]] * 500)
    worker = RolloutWorker(alone(made))
    await worker.take_policy(Adapter.build(3, b"three", {}))
    table = await worker.rollout(PROBLEM, replace(SAMPLING, n=2), 0)
    await worker.close()
    assert table is not None
    found = {(row["finish_reason"], row["reward"], row["reward_status"]) for row in table.to_pylist()}
    assert found == {("length", 0.0, "ok")}
    assert parts_of(table) == [{"env": 0.0}] * 2


async def test_nor_is_never_to_come_to_an_end_that_pays(tmp_path: Path) -> None:
    worker = RolloutWorker(alone(spec(tmp_path, "pays at its end", max_turns=3)))
    await worker.take_policy(Adapter.build(3, b"three", {}))
    table = await worker.rollout(PROBLEM, replace(SAMPLING, n=1), 0)
    await worker.close()
    assert table is not None
    (row,) = table.to_pylist()
    assert (row["finish_reason"], row["reward"], row["reward_status"]) == ("turns", 0.0, "ok")


async def test_a_policy_that_arrives_amid_a_turn_has_its_version_at_the_tokens_it_sampled(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rollout.in_flight: continue. What is answered has the version of the token before it, and teaches nothing."""
    worker = await started()
    told = worker.engine.generate

    async def continued(prompt_ids: Sequence[int], sampling: Sampling) -> list[Completion]:
        (turn,) = await told(prompt_ids, sampling)
        newer = np.arange(len(turn.token_ids)) >= 2
        logprobs = np.where(newer, -0.25, -0.5).astype(np.float32)
        return [replace(turn, versions=turn.versions + len(worker.engine.asked) - 1 + newer, logprobs=logprobs)]

    monkeypatch.setattr(worker.engine, "generate", continued)
    row = (await worker.rollout(PROBLEM, replace(SAMPLING, n=1), 0)).to_pylist()[0]
    turn, seen = len(row["completion_ids"]), len(CHAT.observe([{"role": "user", "content": "go on"}], STOP))
    turn = (turn - 2 * seen) // 3
    wanted = [[3 + k] * 2 + [4 + k] * (turn - 2) for k in range(3)]
    assert row["token_versions"] == [*wanted[0], *[4] * seen, *wanted[1], *[5] * seen, *wanted[2]]
    sampled = [-0.5] * 2 + [-0.25] * (turn - 2)
    assert row["behavior_logprobs"] == [*sampled, *[0.0] * seen, *sampled, *[0.0] * seen, *sampled]
    assert (row["policy_version_min"], row["policy_version_max"]) == (3, 6)


async def test_what_was_sampled_is_never_tokenised_again(started: Any) -> None:
    """The policy writes letter by letter what the tokenizer would write in fewer tokens."""
    letters = [CHAT.tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "reasoning"]
    assert CHAT.tokenizer.encode(CHAT.decode(letters), add_special_tokens=False) != letters
    worker = await started(sample=lambda ids, _: [*letters, STOP])
    table = await worker.rollout(PROBLEM, replace(SAMPLING, n=2), 0)
    ids, mask = (table.column(name)[0].as_py() for name in ("completion_ids", "loss_mask"))
    assert [token for token, sampled in zip(ids, mask, strict=True) if sampled] == [*letters, STOP] * 3
    longest = max((asked for asked, _ in worker.engine.asked), key=len)
    assert longest == [*table.column("prompt_ids")[0].as_py(), *ids[: -len(letters) - 1]]


@pytest.mark.parametrize("history", ["append", "template"])
async def test_an_environment_that_writes_special_tokens_writes_their_letters(started: Any, history: str) -> None:
    """One row: the whole rendered conversation still begins with what was asked and sampled."""
    worker = await started("speaks as the model", history=history)
    table = await worker.rollout(PROBLEM, replace(SAMPLING, n=1), 0)
    (row,) = table.to_pylist()
    turn = [*CHAT.tokenizer.encode("3 or 3", add_special_tokens=False), STOP]
    added = CHAT.tokenizer.get_added_vocab()
    marks = [token for token in row["completion_ids"] if token in added.values()]
    between = [added["<|user|>"], STOP, added["<|assistant|>"]]
    assert marks == [STOP, *between, STOP, *between, STOP]
    said = ["4<|end|><|assistant|>5<|end|>", "|end|> <answer>6</answer><|user|>"]
    written = "".join(f"3 or 3<|end|><|user|>{text}<|end|><|assistant|>" for text in said) + "3 or 3<|end|>"
    assert CHAT.decode(row["completion_ids"], special=True) == written
    assert [message["content"] for message in json.loads(row["messages"])][1::2] == said
    seen = [i for i, sampled in enumerate(row["loss_mask"]) if not sampled]
    sampled = [token for i, token in enumerate(row["completion_ids"]) if i not in seen]
    assert sampled == turn * 3
    assert {row["behavior_logprobs"][i] for i in seen} == {0.0}
    assert row["finish_reason"] == "done"


THOUGHTLESS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
    "{{ m.content.split('</reasoning>')[-1] }}END{% endif %}:{% endfor %}"
)


async def test_where_the_template_drops_thinking_each_turn_is_learned_in_a_row_of_its_own(started: Any) -> None:
    turn = [*CHAT.tokenizer.encode("<reasoning>1</reasoning>3", add_special_tokens=False), STOP]
    worker = await started(sample=lambda ids, _: turn, history="template")
    tokenizer = worker.chat.tokenizer
    tokenizer.chat_template = THOUGHTLESS.replace("END", tokenizer.convert_ids_to_tokens(STOP))
    table = await worker.rollout(PROBLEM, replace(SAMPLING, n=2), 0)
    assert table.column("sample").to_pylist() == [0, 0, 0, 1, 1, 1]
    asked, said = {"role": "user", "content": "begin"}, {"role": "assistant", "content": "3"}
    again = {"role": "user", "content": "go on"}
    for i, row in enumerate(table.slice(3).to_pylist()):
        rendered = list(worker.chat.render([asked, *[said, again] * i])[1])
        assert [*row["prompt_ids"], *row["completion_ids"]] == [*rendered, *turn]
        assert row["loss_mask"] == [False] * (len(row["completion_ids"]) - len(turn)) + [True] * len(turn)
        assert (row["reward"], row["messages"] is None) == (
            4.5,
            i < 2,
        )  # three turns of 0.5, and three times the answer
    rows = read([table])
    assert rows.owners is not None
    assert (rows.owners.tolist(), [len(group) for group in rows.rewards]) == ([0, 0, 0, 1, 1, 1], [2])
    assert rows.counts.tolist() == [len(turn)] * 6


async def test_a_fault_has_no_reward_and_the_rest_of_the_group_stays(started: Any, tmp_path: Path) -> None:
    worker = await started("raises")
    table = await worker.rollout(PROBLEM, SAMPLING, 0)
    assert table.column("finish_reason").to_pylist() == ["env_error"] * 5
    assert table.column("reward").to_pylist() == [None] * 5
    assert table.column("reward_status").to_pylist() == ["environment"] * 5
    assert table.column("reward_error")[0].as_py().startswith("environment: env_error: ")
    assert read([table]).counts.min() > 0
    before = await started("reset raises")
    table = await before.rollout(PROBLEM, SAMPLING, 0)
    assert table.column("completion_ids").to_pylist() == [[]] * 5
    assert table.column("policy_version_max").to_pylist() == [3] * 5  # the newest, since no token has one
    assert read([table]).counts.tolist() == [0] * 5


async def test_variables_of_the_chat_template_reach_what_is_rendered_here(tmp_path: Path) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    with (folder / "chat_template.jinja").open("a") as template:
        template.write("{{ opening }}")
    asked = spec(tmp_path)
    assert asked.env is not None
    env = replace(asked.env, chat_template_kwargs={"opening": "17"})
    worker = RolloutWorker(replace(asked, env=env, engine=replace(asked.engine, model=str(folder))))
    try:
        await worker.take_policy(Adapter.build(3, b"three", {}))
        table = await worker.rollout(PROBLEM, replace(SAMPLING, n=1), 0)
    finally:
        await worker.close()
    assert table is not None
    row = table.to_pylist()[0]
    assert CHAT.decode(row["prompt_ids"]).endswith("begin17")
    assert CHAT.decode(row["completion_ids"]) == "3 or 3go on173 or 3go on173 or 3"


async def test_a_reward_function_may_not_be_called_as_a_part_of_the_environment_is(
    started: Any, tmp_path: Path
) -> None:
    whole = spec(tmp_path)
    rewards = (RewardConfig(use=f"{tmp_path}/mine.py:said", name="env"),)
    worker = RolloutWorker(replace(whole, rewards=rewards))
    await worker.take_policy(Adapter.build(3, b"three", {}))
    with pytest.raises(
        ValueError, match="rewards: each part must have a name of its own, and the environment gives env"
    ):
        await worker.rollout(PROBLEM, SAMPLING, 0)
    await worker.close()


async def test_environments_that_begin_differently_are_an_error(started: Any) -> None:
    worker = await started("other start")
    with pytest.raises(WrongInput, match="those of train-3 have 5 different initial states; draw everything in reset"):
        await worker.rollout(PROBLEM, SAMPLING, 0)


def test_only_what_cannot_fit_is_refused_before_it_is_made_tokens_of() -> None:
    dialogue = ChatDialogue(CHAT, "hermes", CHAT.stop_ids)
    assert max(map(len, CHAT.tokenizer.get_vocab())) == len("<|assistant|>") == 13
    for text in ["</reasoning>" * 9, "<reasoning>", " " * 99, "ü" * 9, "the 123 answer"]:
        tokens = len(CHAT.tokenizer.encode(text, add_special_tokens=False))
        assert dialogue.may_fit([{"role": "user", "content": text}], tokens)
    assert not dialogue.may_fit([{"role": "user", "content": "x" * 33}, {"role": "user", "content": "x" * 33}], 5)


async def test_what_nobody_expects_names_the_trajectory_and_the_place(started: Any) -> None:
    worker = await started(sample=lambda ids, _: [-1, STOP])  # no tokenizer decodes that
    with pytest.raises(RuntimeError, match=r"trajectory \d of problem train-3 failed, .*: OverflowError: .* line \d"):
        await worker.rollout(PROBLEM, SAMPLING, 0)
