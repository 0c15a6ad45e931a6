"""Problems from every source, tokenised once, in an order that depends on seed and epoch and on nothing else.
Problems without a text of their own: an environment says what the model is asked. What is known of prompts before
each is tokenised: never other than what tokenising all of them says.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, normalizers

from cluster.errors import WrongInput
from examples.random_model import EOS_IDS, VOCAB_SIZE, make_tokenizer
from learner.config import RunConfig
from learner.driver.identity import fingerprints_of
from rollout.config import DataConfig, EvalConfig, TeacherConfig
from rollout.data import files
from rollout.data import problems as stock
from rollout.data.chat import Chat, Messages, Prompt
from rollout.data.problems import Problems, fitting, load, load_whole
from rollout.data.sources import Pace
from rollout.schema import Problem
from tests.rollout.data.test_sources import Letters

ROWS = [{"question": f"What is {i}+{i}?", "answer": str(2 * i), "level": i % 3} for i in range(40)]
NO_EVAL = EvalConfig(every=0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tokenizer(), EOS_IDS, VOCAB_SIZE)


def jsonl(folder: Path, rows: list[dict[str, Any]], name: str = "train.jsonl") -> str:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def stream(problems: Problems, count: int) -> list[str]:
    return [problems.at(position).id for position in range(count)]


def test_jsonl(tmp_path: Path, chat: Chat) -> None:
    data = DataConfig(path=jsonl(tmp_path, ROWS), eval=NO_EVAL)
    problems, held_out = load(data, chat, 256, seed=0)
    assert (len(problems), held_out) == (40, [])
    problem = next(p for p in map(problems.at, range(40)) if p.id == "train-7")
    assert problem.messages == ({"role": "user", "content": "What is 7+7?"},)
    assert problem.columns == ROWS[7]
    assert problem.prompt_ids == chat.render(problem.messages)[1]


def test_parquet_gives_the_same_problems_as_jsonl(tmp_path: Path, chat: Chat) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "train.parquet")
    table, _ = load(DataConfig(path=str(tmp_path / "train.parquet"), eval=NO_EVAL), chat, 256, seed=3)
    lines, _ = load(DataConfig(path=jsonl(tmp_path, ROWS), eval=NO_EVAL), chat, 256, seed=3)
    assert [table.at(i) for i in range(40)] == [lines.at(i) for i in range(40)]


def test_a_template_and_a_system_prompt(tmp_path: Path, chat: Chat) -> None:
    prompt = "Level {level}, {{braces}}: {question}"
    data = DataConfig(path=jsonl(tmp_path, ROWS[:1]), prompt=prompt, system="Think.", eval=NO_EVAL)
    problems, _ = load(data, chat, 256, seed=0)
    assert problems.at(0).messages == (
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "Level 0, {braces}: What is 0+0?"},
    )


def test_a_column_of_chat_messages(tmp_path: Path, chat: Chat) -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "1+1"},
    ]
    system = {"role": "system", "content": "Think."}
    data = DataConfig(path=jsonl(tmp_path, [{"chat": turns}]), prompt="chat", system="Think.", eval=NO_EVAL)
    problems, _ = load(data, chat, 256, seed=0)
    assert problems.at(0).messages == (system, *turns)
    own = data.model_copy(update={"path": jsonl(tmp_path, [{"chat": [system, *turns]}], "own.jsonl")})
    with pytest.raises(WrongInput, match=r"data\.system: must be null .* and own-0 does"):
        load(own, chat, 256, seed=0)


HINT = "{question} (The answer: {answer})"


def test_a_teachers_prompt_is_of_the_same_row(tmp_path: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """data.teacher, in any order of the problems, where rows are left out, and beyond the prompts that are tokenised
    at once. The policy's own prompts, and those that are held out, are as without it."""
    monkeypatch.setattr(stock, "FIRST", 8)
    others: list[dict[str, Any]] = [{"question": "", "answer": "1"}, {"question": "Why?", "answer": None}]
    rows: list[dict[str, Any]] = [*ROWS, *others, ROWS[0] | {"question": "Ah?"}]
    data = DataConfig(path=jsonl(tmp_path, rows), system="Be brief.", eval=EvalConfig(size=4))
    hinted = data.model_copy(update={"teacher": TeacherConfig(prompt=HINT)})
    plain, held_out = load(data, chat, 256, seed=3)
    problems, same = load(hinted, chat, 256, seed=3)
    assert [one.prompt_ids for one in same] == [one.prompt_ids for one in held_out]
    assert {one.teacher_ids for one in same} == {None}
    assert {plain.at(i).teacher_ids for i in range(len(plain))} == {None}
    left = {plain.at(i).id for i in range(len(plain))} - {problems.at(i).id for i in range(len(problems))}
    assert left <= {"train-41"}  # the row without an answer, unless it is held out
    for problem in map(problems.at, range(len(problems))):
        row = rows[int(problem.id.removeprefix("train-"))]
        asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": HINT.format(**row)}]
        assert problem.teacher_ids == chat.render(asked)[1]
        assert problem.prompt_ids == chat.render([asked[0], {"role": "user", "content": row["question"]}])[1]
    fitting = problems.fitting(hinted, 256, 0)
    assert [fitting.at(i).teacher_ids for i in range(9)] == [problems.at(i).teacher_ids for i in range(9)]
    kinds = list(problems.prompts())
    assert len(kinds) == 2
    assert all(len(kind) == 2 for kind in kinds)


def test_a_teachers_system_message_takes_the_place_of_the_policys(tmp_path: Path, chat: Chat) -> None:
    data = DataConfig(path=jsonl(tmp_path, ROWS[:2]), system="A", teacher=TeacherConfig(system="B"), eval=NO_EVAL)
    problem = load(data, chat, 256, seed=0)[0].at(0)
    told = [[{"role": "system", "content": word}, *problem.messages[1:]] for word in "AB"]
    assert [problem.prompt_ids, problem.teacher_ids] == [chat.render(one)[1] for one in told]


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        ({"prompt": "{answr}"}, r"data\.teacher\.prompt: .*no column 'answr'.*did you mean 'answer'"),
        ({"prompt": "talk", "system": "B"}, r"data\.teacher\.system: must be null where .* teacher-train-0 does"),
        ({"prompt": "nothing"}, r"data\.teacher\.prompt: 'nothing' must give a text .*teacher-train-0 gives None"),
        ({"prompt": HINT, "max_prompt_length": 9}, r"data\.teacher\.max_prompt_length: every prompt must fit into 9 "),
    ],
)
def test_what_is_wrong_with_a_teachers_prompt_is_said_of_its_settings(
    tmp_path: Path, chat: Chat, teacher: dict[str, Any], said: str
) -> None:
    talk = [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    path = jsonl(tmp_path, [row | {"talk": talk, "nothing": None} for row in ROWS])
    data = DataConfig(path=path, teacher=TeacherConfig(**teacher), eval=NO_EVAL)
    with pytest.raises(WrongInput, match=said) as error:
        load(data, chat, 256, seed=0)
    assert "rollout.max_prompt_length" not in str(error.value)


def test_problems_whose_teachers_prompt_is_too_long_can_be_left_out(tmp_path: Path, chat: Chat) -> None:
    rows = [*ROWS, ROWS[0] | {"question": "What?", "answer": "long " * 99}]
    teacher = TeacherConfig(prompt=HINT, max_prompt_length=100)
    data = DataConfig(path=jsonl(tmp_path, rows), teacher=teacher, overlong="drop", eval=NO_EVAL)
    problems, _ = load(data, chat, 256, seed=0)
    assert "train-40" not in stream(problems, len(problems))
    assert len(problems) == 40


def test_without_a_chat_template_the_prompt_is_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    data = DataConfig(path=jsonl(tmp_path, ROWS[:1]), eval=NO_EVAL)
    problems, _ = load(data, Chat(tokenizer, EOS_IDS, VOCAB_SIZE), 256, seed=0)
    assert problems.at(0).messages == "What is 0+0?"


def test_the_order_is_a_function_of_seed_and_epoch(tmp_path: Path, chat: Chat) -> None:
    data = DataConfig(path=jsonl(tmp_path, ROWS), eval=NO_EVAL)
    problems, _ = load(data, chat, 256, seed=5)
    first, second = stream(problems, 80)[:40], stream(problems, 80)[40:]
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 40  # every problem once an epoch
    assert first != second
    assert (problems.at(79).epoch, problems.at(79).position, problems.at(39).epoch) == (1, 79, 0)
    again, _ = load(data, chat, 256, seed=5)
    assert [again.at(p).id for p in reversed(range(80))] == [*reversed(first + second)]  # asked in any order
    other, _ = load(data, chat, 256, seed=6)
    assert stream(other, 40) != first


def test_data_size_takes_the_first_rows(tmp_path: Path, chat: Chat) -> None:
    problems, _ = load(DataConfig(path=jsonl(tmp_path, ROWS), size=5, eval=NO_EVAL), chat, 256, seed=0)
    assert sorted(stream(problems, 5)) == [f"train-{i}" for i in range(5)]


@pytest.mark.parametrize(("size", "expected"), [(200, 4), (3, 3)])
def test_held_out_problems_are_never_trained_on(tmp_path: Path, chat: Chat, size: int, expected: int) -> None:
    rows = ROWS + ROWS[:10]  # prompts that occur twice must be held out twice
    data = DataConfig(path=jsonl(tmp_path, rows), eval=EvalConfig(size=size))
    problems, held_out = load(data, chat, 256, seed=0)
    assert len(held_out) == expected
    trained = {problems.at(position).prompt_ids for position in range(len(problems))}
    assert trained.isdisjoint(problem.prompt_ids for problem in held_out)
    assert len(trained) + len(held_out) == 40  # and nothing is lost
    assert {problem.epoch for problem in held_out} == {-1}
    assert load(data, chat, 256, seed=0)[1] == held_out
    assert load(data, chat, 256, seed=1)[1] != held_out


def test_evaluation_from_its_own_file(tmp_path: Path, chat: Chat) -> None:
    train, test = jsonl(tmp_path, ROWS[:30]), jsonl(tmp_path, ROWS[30:], "test.jsonl")
    problems, held_out = load(DataConfig(path=train, eval=EvalConfig(path=test, size=6)), chat, 256, seed=0)
    assert len(problems) == 30
    assert [problem.columns for problem in held_out] == ROWS[30:36]
    assert held_out[0].id == "eval-test-0"
    jsonl(tmp_path, ROWS[30:], "held.jsonl")
    several = DataConfig(path=train, eval=EvalConfig(path=str(tmp_path / "he*.jsonl"), size=6))
    assert load(several, chat, 256, seed=0)[1][0].id == "eval-test-0"  # of a pattern, by its split
    pattern = DataConfig(path=str(tmp_path / "he*.jsonl"), shuffle=False, eval=NO_EVAL)
    assert load(pattern, chat, 256, seed=0)[0].at(0).id == "train-0"
    alone, _ = load(DataConfig(path=train, eval=NO_EVAL), chat, 256, seed=0)
    assert stream(problems, 60) == stream(alone, 60)


def test_two_splits_of_the_hub_may_share_some_problems(caplog: pytest.LogCaptureFixture) -> None:
    """Of a data set there eval.path takes the split test, where a file is taken whole."""
    stock._check_apart(1, 2, DataConfig(path="org/sums", eval=EvalConfig(path="org/sums")))
    assert "1 of 2 held-out problems are in the training data" in caplog.text


def test_what_is_trained_on_is_not_held_out(
    tmp_path: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same file under whatever name, a copy of it; single rows in both are told and taken."""
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path, ROWS)
    refused = r"data\.eval: held-out problems must not be trained on, and {} of {} .*; give .* leave data\.eval\.path"
    for path, size, known, count in (
        ("./train.jsonl", None, 40, 40),
        (str(tmp_path / "train.jsonl"), 10, 10, 40),
        (jsonl(tmp_path, ROWS[3:7], "copy.jsonl"), None, 4, 4),
    ):
        data = DataConfig(path="train.jsonl", size=size, eval=EvalConfig(path=path))
        with pytest.raises(WrongInput, match=refused.format(known, count)):
            load(data, chat, 256, seed=0)
    assert caplog.records == []
    other = jsonl(tmp_path, [ROWS[3], {"question": "New?", "answer": "yes"}], "other.jsonl")
    assert len(load(DataConfig(path="train.jsonl", eval=EvalConfig(path=other)), chat, 256, seed=0)[1]) == 2
    assert "1 of 2 held-out problems are in the training data" in caplog.text
    parts = DataConfig(path="train.jsonl", split="train[:30]", eval=EvalConfig(split="train[30:]"))
    assert len(load(parts, chat, 256, seed=0)[1]) == 10


def test_a_reasoning_gym_task(chat: Chat) -> None:
    args = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    data = DataConfig(path="rg:chain_sum", args=args, size=60, eval=EvalConfig(size=10))
    problems, held_out = load(data, chat, 256, seed=4)
    assert (len(problems), len(held_out)) == (60, 10)
    trained = {problems.at(position).columns["question"] for position in range(60)}
    assert trained.isdisjoint(problem.columns["question"] for problem in held_out)  # though only 200 sums exist
    columns = problems.at(0).columns
    assert set(columns) == {"question", "answer", "metadata"}
    assert json.loads(columns["metadata"])["source_dataset"] == "chain_sum"
    assert [problems.at(i) for i in range(9)] == [load(data, chat, 256, seed=4)[0].at(i) for i in range(9)]
    assert load(data, chat, 256, seed=5)[0].at(0) != problems.at(0)
    whole = load_whole(data, chat, 256, seed=4)
    assert {problem.columns["question"] for problem in whole} == trained


def test_too_few_different_questions(chat: Chat) -> None:
    args = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    data = DataConfig(path="rg:chain_sum", args=args, size=8000, eval=EvalConfig(size=5))
    with pytest.raises(WrongInput, match=r"questions that training lacks.*lower data\.size"):
        load(data, chat, 256, seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "questoin"}, "no column 'questoin'; columns are question, answer, level; did you mean 'question'?"),
        ({"prompt": "Q: {query}"}, "no column 'query'; columns are question, answer, level"),
        ({"prompt": "Q: {question"}, "got 'Q: {question' .*; write a literal brace twice"),
        ({"prompt": "level"}, "a text or a list of .* messages, not empty; train-0 gives 0; name another column"),
        ({"path": "nowhere/train.jsonl"}, "file must exist, got nowhere/train.jsonl"),
        ({"path": "rg:chain_sums"}, "got 'chain_sums'; nearest: .*chain_sum"),
        ({"path": "rg:chain_sum", "args": {"terms": 3}}, r"data\.args: must be settings of the task chain_sum"),
        ({"path": "rg:chain_sum", "args": {"min_terms": -1}}, r"data\.args: must be settings of the task chain_sum"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, chat: Chat, change: dict[str, Any], message: str) -> None:
    data = {"path": jsonl(tmp_path, ROWS), "eval": NO_EVAL, **change}
    with pytest.raises(WrongInput, match=message):
        load(DataConfig(**data), chat, 256, seed=0)


def test_a_wrong_file_name_brings_the_nearest(tmp_path: Path, chat: Chat) -> None:
    jsonl(tmp_path, ROWS)
    with pytest.raises(WrongInput, match=r"did you mean train\.jsonl\?"):
        load(DataConfig(path=str(tmp_path / "trian.jsonl")), chat, 256, seed=0)


def test_a_hub_name_without_a_network(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(WrongInput, match="org/sums is neither a file or folder here nor in the hub's cache"):
        load(DataConfig(path="org/sums"), chat, 256, seed=0)


@pytest.mark.parametrize("content", ["", "not json\n"], ids=["empty", "broken"])
def test_a_file_without_rows(tmp_path: Path, chat: Chat, content: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(WrongInput, match=r"bad\.jsonl"):
        load(DataConfig(path=str(tmp_path / "bad.jsonl")), chat, 256, seed=0)


SYSTEM = {"role": "system", "content": ""}


@pytest.mark.parametrize("value", ["", "  ", None, float("nan"), [], [{"role": "user", "content": ""}], [SYSTEM]])
def test_a_row_without_a_prompt_is_left_out_and_named(
    tmp_path: Path, chat: Chat, caplog: pytest.LogCaptureFixture, value: object
) -> None:
    fine: object = "2+2?" if isinstance(value, str | float) or value is None else [{"role": "user", "content": "2+2?"}]
    rows = [{"question": fine}, {"question": value}, {"question": fine}]
    problems, _ = load(DataConfig(path=jsonl(tmp_path, rows), eval=NO_EVAL), chat, 256, seed=0)
    assert sorted(problems.at(i).id for i in range(2)) == ["train-0", "train-2"]
    assert "train: left out 1 of 3 rows without a prompt; data.prompt: 'question'" in caplog.text
    with pytest.raises(WrongInput, match="not empty; train-1 gives"):
        load(DataConfig(path=jsonl(tmp_path, rows[:1] + rows[1:2] * 2), eval=NO_EVAL), chat, 256, seed=0)


@pytest.mark.parametrize(
    "value",
    [
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "?"}],
    ],
)
def test_a_prompt_that_is_wrong_is_not_left_out(tmp_path: Path, chat: Chat, value: object) -> None:
    rows = [{"question": [{"role": "user", "content": "2+2?"}]}] * 3 + [{"question": value}]
    with pytest.raises(WrongInput, match="not empty; train-3 gives"):
        load(DataConfig(path=jsonl(tmp_path, rows), eval=NO_EVAL), chat, 256, seed=0)


def test_a_prompt_of_each_kind_is_looked_at(tmp_path: Path, chat: Chat) -> None:
    """A template may leave out an empty system message, or one that is there."""
    asked = {"role": "user", "content": "2 + 2"}
    rows = [{"prompt": [{"role": "system", "content": said}, asked]} for said in ("", "Be brief.", "", "Be kind.")]
    problems, _ = load(DataConfig(path=jsonl(tmp_path, rows), prompt="prompt", eval=NO_EVAL), chat, 256, seed=0)
    assert len(list(problems.prompts())) == 2


def test_an_empty_system_message_is_no_empty_prompt(tmp_path: Path, chat: Chat) -> None:
    turns = [SYSTEM, {"role": "user", "content": "2+2?"}]
    problems, _ = load(DataConfig(path=jsonl(tmp_path, [{"question": turns}]), eval=NO_EVAL), chat, 256, seed=0)
    assert problems.at(0).messages == tuple(turns)


def test_prompts_that_are_too_long_are_counted_and_the_remedy_works(
    tmp_path: Path, chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": "?" * (10 if i % 2 else 300)} for i in range(20)]
    data = DataConfig(path=jsonl(tmp_path, rows), eval=NO_EVAL)
    with pytest.raises(WrongInput) as caught:
        load(data, chat, 256, seed=0)
    longest = len(chat.render([{"role": "user", "content": "?" * 300}])[1])
    assert "256 tokens, and 10 of 20 do not (train-0, train-2, train-4, train-6, train-8, ...;" in str(caught.value)
    assert f"set rollout.max_prompt_length: {longest}" in str(caught.value)
    problems, _ = load(data, chat, longest, seed=0)
    assert len(problems) == len(problems.fitting(data, longest + 9, tools=9)) == 20
    with pytest.raises(WrongInput, match=f"which take 9, and 10 of 20 .*; set rollout.*: {longest + 9}, or"):
        problems.fitting(data, longest, tools=9)
    drop = data.model_copy(update={"overlong": "drop"})
    fit = problems.fitting(drop, longest, tools=9)
    assert {fit.at(position).columns["question"] for position in range(len(fit))} == {"?" * 10}
    assert f"train: dropped 10 of 20 prompts of over {longest} tokens with the environment's tools" in caplog.text


def test_held_out_prompts_that_are_too_long_are_counted_and_dropped_alike(
    tmp_path: Path, chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": "?" * (10 + i)} for i in range(12)]
    data = DataConfig(path=jsonl(tmp_path, rows), eval=NO_EVAL)
    problems, _ = load(data, chat, 256, seed=5)
    items = [problems.at(position) for position in range(12)]
    sizes = sorted(len(item.prompt_ids) for item in items)
    assert fitting(items, data, sizes[-1] + 9, tools=9) == items
    assert fitting(items, data, sizes[-1]) == items
    assert fitting([], data, 1) == []
    with pytest.raises(WrongInput, match=r"which take 9, and 2 of 12 do not \(train-\d+, train-\d+; the longest has"):
        fitting(items, data, sizes[-3] + 9, tools=9)
    kept = fitting(items, data.model_copy(update={"overlong": "drop"}), sizes[-3] + 9, tools=9)
    assert kept == [item for item in items if len(item.prompt_ids) <= sizes[-3]]
    assert "train: dropped 2 of 12 prompts" in caplog.text
    fit = problems.fitting(data, 256, tools=1)
    assert [fit.at(position).id for position in range(12)] == [item.id for item in items]  # the order stays the seed's


def test_of_one_prompt_none_is_held_out_unless_evaluation_was_asked_for(
    tmp_path: Path, chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    data = DataConfig(path=jsonl(tmp_path, ROWS[:1] * 3))
    problems, held_out = load(data, chat, 256, seed=0)
    assert (len(problems), held_out) == (3, [])
    assert "none is held out and nothing is evaluated" in caplog.text
    for asked in (EvalConfig(every=5), EvalConfig(size=1)):
        with pytest.raises(WrongInput, match=r"at least 2 different prompts.*data\.eval\.every: 0"):
            load(data.model_copy(update={"eval": asked}), chat, 256, seed=0)


def test_without_shuffle_each_epoch_is_in_the_order_of_the_source(tmp_path: Path, chat: Chat) -> None:
    rows = [{"question": f"{i} + 1"} for i in range(12)]
    data = DataConfig(path=jsonl(tmp_path, rows), shuffle=False)
    problems, held_out = load(data, chat, 256, seed=3)
    assert len(held_out) == 1
    kept = [row["question"] for row in rows if row["question"] != held_out[0].columns["question"]]
    assert [problems.at(i).columns["question"] for i in range(22)] == kept * 2
    assert [problems.at(i).epoch for i in (10, 11)] == [0, 1]
    fit = problems.fitting(data, 256, tools=1)
    assert [fit.at(i).columns["question"] for i in range(3)] == kept[:3]


# Problems without a text of their own: an environment says what the model is asked.


def loaded(eval_: dict[str, Any] | None = None, **config: Any) -> tuple[Problems, list[Problem]]:
    return load(DataConfig(**config, eval=EvalConfig(**eval_ or {})), Letters(), 99, 0)


@pytest.mark.parametrize("size", [1, 30, None])
def test_there_are_as_many_as_are_asked_for_and_others_for_evaluation(size: int | None) -> None:
    problems, held_out = loaded({"size": 5}, path="env:own", size=size)
    assert (len(problems), len(held_out)) == (size or 1000, 5)
    asked = [problems.at(i) for i in range(len(problems))]
    assert all(one.messages == ({"role": "user", "content": ""},) for one in asked)
    numbers = {one.columns["episode"] for one in asked}
    assert numbers == set(range(len(problems)))
    assert not numbers & {one.columns["episode"] for one in held_out}
    assert asked[0].id.startswith("env-")


def test_rows_without_a_prompt_are_told_apart_by_their_columns(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    rows = [{"environment": name, "level": i // 2} for i in range(30) for name in ("maze", "chess")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems, held_out = loaded(path=str(file), prompt=None, system="Play.")
    assert [message["role"] for message in problems.at(0).messages] == ["system", "user"]  # type: ignore[index]
    out = {(one.columns["environment"], one.columns["level"]) for one in held_out}
    assert len(out) == 3  # a tenth of the thirty different ones
    assert len(problems) == 60 - 2 * 3
    assert not out & {(problems.at(i).columns["environment"], problems.at(i).columns["level"]) for i in range(54)}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"split": "test"}, "data.split: .* no splits, got 'test'"),
        ({"args": {"a": 1}}, "data.args: env:own takes none"),
    ],
)
def test_it_has_neither_splits_nor_arguments(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WrongInput, match=sentence):
        loaded(path="env:own", **wrong)


# What is known of prompts before each is tokenised: never other than what tokenising all of them says.

WORDS = [
    "plus",
    "What",
    "is",
    "\u00e9",
    "\ufdfa",
    "q" * 40,
    "1+1",
    "\u2028",
    "a\tb",
    "\uff21\uff22",
    "\u2026" * 9,
    "<|im_end|>",
    "stra\u00dfe",
    "42",
]


class Counting(Chat):
    rendered = 0

    def render(self, messages: Messages, tools: Any = ()) -> tuple[Prompt, tuple[int, ...]]:
        self.rendered += 1
        return super().render(messages, tools)


def stock_chat(kind: str) -> Counting:
    tokenizer: Any = make_tokenizer()
    if kind == "plain":
        tokenizer.chat_template = None
    if kind == "lower":
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    if kind == "digits":  # texts that differ in more than letter case and white space are one prompt
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("[0-9]"), "0")
    if kind == "longer":  # a word has more tokens than bytes
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace("q", "?!" * 9)
    return Counting(tokenizer, EOS_IDS, VOCAB_SIZE)


def rows() -> list[dict[str, str]]:
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) + f" {i % 90}" for i in range(150)]
    wide = {letter: letter + 0xFEE0 for letter in map(ord, "abcdefghijklmnopqrstuvwxyz")}  # NFKC makes them narrow
    changes = (str.upper, lambda text: text.replace(" ", "  "), str, lambda text: text.translate(wide))
    alike = [change(text) for text in texts[:40] for change in changes]
    return [{"question": text} for text in ["1 or", "2 or", *texts, *alike]]


@pytest.mark.parametrize("system", [None, "Answer with a number."])
@pytest.mark.parametrize("kind", ["chat", "plain", "lower", "digits", "longer"])
def test_the_same_problems_as_if_all_had_been_tokenised(
    kind: str, system: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which fit, which are held out, and which of these are in training as well."""
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    data = DataConfig(path=str(file), overlong="drop", system=system, eval=EvalConfig(size=9))
    found = []
    for first in (20, 10**9):
        monkeypatch.setattr(stock, "FIRST", first)
        problems, held_out = load(data, stock_chat(kind), 70, seed=3)
        found.append(([problems.at(place) for place in range(len(problems))], held_out))
    assert found[0] == found[1]
    kept, held_out = found[0]
    assert 50 < len(kept) < 312 - 9
    assert {problem.prompt_ids for problem in kept}.isdisjoint(problem.prompt_ids for problem in held_out)


@pytest.mark.parametrize("gap", [" ", "   "])
def test_short_prompts_are_tokenised_as_they_are_asked_for(
    gap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock, "FIRST", 20)
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"question": f"What{gap}is {i} plus {i}?"}) + "\n" for i in range(500)))
    counting = stock_chat("chat")
    problems, held_out = load(DataConfig(path=str(file), eval=EvalConfig(size=9)), counting, 256, seed=0)
    assert (len(problems), len(held_out)) == (491, 9)
    assert counting.rendered < 50


def test_a_prompt_that_is_longer_than_was_held_to_be_ends_by_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompts told nothing of a word that this tokenizer makes many tokens of."""
    monkeypatch.setattr(stock, "FIRST", 20)
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"question": "q" if i == 90 else "a"}) + "\n" for i in range(91)))
    problems, _ = load(DataConfig(path=str(file), eval=EvalConfig(every=0)), stock_chat("longer"), 25, seed=0)
    with pytest.raises(WrongInput, match=r"^rollout.max_prompt_length: .* into 25 tokens, and train-90 has \d\d"):
        [problems.at(place) for place in range(len(problems))]
    fewer = problems.fitting(DataConfig(path=str(file)), 25, tools=3)
    with pytest.raises(WrongInput, match=r"^rollout.max_prompt_length: .* into 22 tokens, and train-90 has \d\d"):
        [fewer.at(place) for place in range(len(fewer))]


def test_prompts_that_are_alike_are_told_apart_by_their_tokens() -> None:
    texts = ["Add it", "add it", "ADD IT", "Add it", "other"]
    data = DataConfig(path="made.jsonl", eval=NO_EVAL)
    made = stock.Stock([{"question": text} for text in texts], data, stock_chat("chat"), "made", 60.0, files.DATA)
    (found,) = stock.classes((made, np.arange(5)))
    assert found.tolist() == [0, 1, 2, 0, 4]


def test_time_is_judged_by_how_many_prompts_are_tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = []

    class Noted(Pace):
        def late(self, done: int) -> str:
            noted.append((self._total, done))
            return super().late(done)

    monkeypatch.setattr(stock, "Pace", Noted)
    monkeypatch.setattr(stock, "FIRST", 3)
    data = DataConfig(path=jsonl(tmp_path, ROWS[:10]), eval=NO_EVAL, overlong="drop")
    chat = stock_chat("chat")
    longest = max(len(chat.render([{"role": "user", "content": row["question"]}])[1]) for row in ROWS[:10])
    problems, _ = load(data, chat, longest, seed=0)
    assert len(problems) == 10
    assert noted == [(3, 1), (3, 2), (3, 3), *((7, done) for done in range(1, 8))]
    assert len(problems.fitting(data, longest, tools=0)) == 10
    assert len(noted) == 10  # what is known exactly is not tokenised again


def test_rows_have_the_digest_that_older_runs_recorded(tmp_path: Path) -> None:
    """As they were read by 5cd265e, from a list; else none of its runs would go on."""
    config = RunConfig.model_validate(
        {"model": {"path": str(tmp_path)}, "data": {"path": "d"}, "rewards": [{"use": "format"}]}
    )
    content = [{"b": 1.5, "a": "\u00e9", "c": [None, {"z": 10**30}]}, {"a": "2024-01-05"}]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in content))
    problems, _ = load(
        DataConfig(path=str(file), prompt="a", eval=EvalConfig(every=0)), stock_chat("chat"), 256, seed=0
    )
    assert fingerprints_of(config, problems.rows()).data == {
        "number of rows": "2",
        "rows": "5196fb95a4aa5597c62f0f010ac3c5a17350cdd781d2f2c2084f6058221e5a54",
    }
