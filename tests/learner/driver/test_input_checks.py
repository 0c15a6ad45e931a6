"""What is wrong with an environment is said before a run, in one line. A run with a loss of the user's: tried before
it starts, found wherever it runs, remembered by its checkpoints. A chat template that leaves out what a message says
is refused, by name, before anything is trained on it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import WrongInput
from examples.random_model import EOS_IDS, VOCAB_SIZE, make_tiny_model, make_tokenizer
from learner.config import RunConfig
from learner.config.load import absolute
from learner.driver import preflight
from learner.driver.identity import FILE, Fingerprints, check_allowed, check_same_run, fingerprints_of
from learner.driver.input_checks import (
    check_data_prompts,
    check_environment,
    check_environment_column,
    check_prompts,
    follow_adapter,
    load_chat,
)
from rollout.data.chat import Chat
from rollout.schema import Problem
from tests.learner.driver.test_preflight import check, config, model
from tests.learner.loops import configure

MODEL = str(Path(__file__).parents[3] / "examples" / "tiny-arithmetic")
FAULTY = f"{Path(__file__).parents[2] / 'rollout' / 'env' / 'faulty.py'}:Plain"
PROGRAM = f"{Path(__file__).parents[2] / 'rollout' / 'env' / 'programs.py'}:Asking"  # begins with three tokens
AGENTS = Path(__file__).parents[2] / "rollout" / "env" / "agents.py"
PROBLEM = Problem("train-3", ({"role": "user", "content": "1 + 2"},), {"answer": "3"}, (1, 5), 3, 0)
CHAT = Chat.load(MODEL)
TOOL = '''
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b
'''


def test_a_teachers_prompt_with_a_completion_fits_into_the_context(tiny_path: str) -> None:
    tree = {
        "model": {"path": tiny_path}, "rewards": [{"use": "format"}],
        "data": {"path": "x", "teacher": {"prompt": "y", "max_prompt_length": 400}},
        "rollout": {"max_prompt_length": 100, "max_completion_length": 200},
        "learner": {"algorithm": "distill", "loss": {"beta": 1}},
    }  # fmt: skip
    said = r"^data.teacher.max_prompt_length \+ rollout.max_completion_length must be at most .* 512 tokens, got 600"
    with pytest.raises(WrongInput, match=said):
        load_chat(RunConfig.model_validate(tree))
    tree["data"] = {"path": "x"}
    assert load_chat(RunConfig.model_validate(tree | {"learner": {}})).context == 512


def test_an_adapter_of_experts_is_gone_on_with_by_merged_weights_or_on_a_card(tmp_path: Path) -> None:
    content = {
        "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    (tmp_path / "adapter_model.safetensors").touch()
    model = {"path": MODEL, "dtype": "float32", "adapter": str(tmp_path)}
    with pytest.raises(
        WrongInput, match=r"^model.adapter: an adapter of experts needs learner.push=merged where .*; set"
    ):
        follow_adapter(configure(model=model))
    on_card = {"cluster": {"gpus": {"generator": 1.0}}, "model": model | {"dtype": "bfloat16"}}
    for more in ({"learner": {"push": "merged"}, "model": model}, on_card):
        followed, _ = follow_adapter(configure(**more))
        assert followed.learner.lora.targets == ["experts", "q_proj"]


def env_config(env: dict[str, Any], **rollout: Any) -> RunConfig:
    return configure(env=env, rollout=rollout, model={"path": MODEL, "dtype": "float32"})


def test_an_environment_that_begins_and_a_template_that_carries_it_are_fine() -> None:
    assert check_environment(env_config({"use": FAULTY}), CHAT, PROBLEM).notes == ()
    assert check_environment(env_config({}), CHAT, PROBLEM).notes == ()
    assert check_environment(env_config({"use": PROGRAM}, max_prompt_length=3), CHAT, PROBLEM).notes == ()
    agent = env_config({"use": "program", "args": {"function": f"{AGENTS}:at_once"}})
    assert check_environment(agent, CHAT, PROBLEM).notes == ()


@pytest.mark.parametrize(
    ("env", "rollout", "sentence"),
    [
        ({"use": FAULTY, "args": {"wrong": "reset raises"}}, {}, "env.use: .*Plain: reset: OSError: no such level"),
        ({"use": "no.such:Class"}, {}, "env.use: no.such:Class: .*'no.such' does not import"),
        (
            {"use": FAULTY},
            {"max_prompt_length": 4},
            "rollout.max_prompt_length: must hold the environment's first .* got 4",
        ),
        ({"use": PROGRAM}, {"max_prompt_length": 2}, "which take 3 tokens of problem train-3, got 2"),
        ({"use": PROGRAM, "args": {"how": "silent"}}, {}, "Asking: run: must ask the policy for a turn before it ends"),
        (
            {"use": "program", "args": {"function": f"{AGENTS}:greedy"}},
            {},
            "env.use: program: .*last request was refused: temperature, seed: sampling is the run's own .*env.args",
        ),
        (
            {"use": "program", "args": {"function": f"{AGENTS}:at_once"}},
            {"max_prompt_length": 3},
            "rollout.max_prompt_length: must hold the environment's first messages .* got 3",
        ),
        (
            {"use": "program", "args": {"command": "no-such-agent -x"}},
            {},
            "no-such-agent could not be started: No such",
        ),
        ({"use": "program"}, {}, "env.args: must have command or function, and not both"),
        ({"use": "program", "args": {"command": "a", "samplin": 1}}, {}, "env.args: program takes command, function, "),
    ],
)
def test_one_line_says_what_is_wrong(env: dict[str, Any], rollout: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WrongInput, match=sentence):
        check_environment(env_config(env, **rollout), CHAT, PROBLEM)


def test_a_template_without_tools_and_a_model_without_a_template_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TOOL)
    with pytest.raises(WrongInput, match="must write the tools into the prompt, and leaves out add"):
        check_environment(
            env_config({"use": "tools", "args": {"functions": [f"{tmp_path}/mine.py:add"]}}), CHAT, PROBLEM
        )
    plain = Chat.load(MODEL)
    plain.has_template = False
    with pytest.raises(WrongInput, match="env.use: an environment needs a model with a chat template"):
        check_environment(env_config({"use": FAULTY}), plain, PROBLEM)


def chat_of(template: str) -> Chat:
    """The model's, with another template, in which <|end|> stands for the token that ends a turn."""
    chat = Chat.load(MODEL)
    end = chat.tokenizer.convert_ids_to_tokens(chat.stop_ids[0])
    chat.tokenizer.chat_template = template.replace("<|end|>", end)
    return chat


def test_tokens_of_tools_are_counted_beside_the_problems_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TOOL)
    chat = chat_of("{{ tools | tojson }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}answer:")
    env = {"use": "tools", "args": {"functions": [f"{tmp_path}/mine.py:add"]}, "tool_parser": "hermes"}
    own = chat.render([{"role": "user", "content": "1 + 2"}])[1]
    problem = replace(PROBLEM, prompt_ids=own)
    tried = check_environment(env_config(env, max_prompt_length=len(own)), chat, problem)  # left to data.overlong
    whole = {"use": FAULTY, "args": {"wrong": "has tools"}, "tool_parser": "hermes"}
    assert tried.tools > 50
    assert check_environment(env_config(whole), chat, problem).tools == 0  # it begins with messages of its own


# Ends a turn otherwise where it called the tool before.
FICKLE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>"
    "{% if m.role == 'user' and not loop.first and messages|length > 3 %}later {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_template_that_writes_answers_differently_is_told_or_refused() -> None:
    chat = chat_of(FICKLE)
    (note,) = check_environment(env_config({"use": FAULTY}), chat, PROBLEM).notes
    assert note.startswith("env: answers of role user: the model's chat template varies: with")
    with pytest.raises(WrongInput, match="env.history: refuse, and the model's chat template writes answers of role"):
        check_environment(env_config({"use": FAULTY, "history": "refuse"}), chat, PROBLEM)


# Writes an answer of a tool only behind a turn that has the calls in a field of their own.
SILENT = (
    "{{ tools | tojson }}{% set seen = namespace(calls=false) %}{% for m in messages %}"
    "{% if m.tool_calls %}{% set seen.calls = true %}{% endif %}"
    "{% if m.role != 'tool' or seen.calls %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_template_that_is_to_render_the_past_must_write_answers_behind_calls_that_are_text() -> None:
    chat = chat_of(SILENT)
    env = {"use": FAULTY, "args": {"wrong": "has tools"}, "tool_parser": "hermes"}
    assert check_environment(env_config(env), chat, PROBLEM).notes == ()
    with pytest.raises(WrongInput, match="env.history: template, .* role tool .* text, and leaves it out; set"):
        check_environment(env_config(env | {"history": "template"}), chat, PROBLEM)
    assert check_environment(env_config({"use": FAULTY, "history": "template"}), chat_of(FICKLE), PROBLEM).notes == ()


def test_a_row_that_names_no_class_is_refused_before_anything_runs() -> None:
    factories = {"up": "a.py:Up", "down": "a.py:Down"}
    several = env_config({"use": "trl_environment", "args": {"factory": factories}})
    check_environment_column(several, [{"environment": "down"}, {"environment": "up"}])
    for row, told in (
        ({"environment": "left"}, "'left'"),
        ({"episode": 0}, "None"),
        ({"environment": ["up"]}, r"\['up'\]"),
    ):
        with pytest.raises(WrongInput, match=f"training row 1 names {told}; it has up, down; add that, or correct"):
            check_environment_column(several, [{"environment": "up"}, row])
    check_environment_column(env_config({"use": "trl_environment", "args": {"factory": "a.py:Up"}}), [{}])


# A run with a loss of the user's: tried before it starts, found wherever it runs, remembered by its checkpoints.

LOSS = "def mine(tokens, cap=2.0):\n    return tokens.weighted(tokens.ratio.clamp(max=cap)), tokens.ratio > cap\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("my_loss.py").write_text(LOSS)
    return tmp_path


def config_of(ratio: str = "my_loss.py:mine", **changed: Any) -> RunConfig:
    given: dict[str, Any] = {
        "model": {"path": "tiny", "dtype": "float32"},
        "data": {"path": "data.jsonl", "eval": {"every": 0}},
        "rewards": [{"use": "format"}],
        "rollout": {"max_prompt_length": 64, "max_completion_length": 16},
        "learner": {"loss": {"ratio": ratio}},
    }
    return RunConfig.model_validate(given | changed)


def test_the_file_is_named_by_its_whole_path(here: Path) -> None:
    assert absolute(config_of()).learner.loss.ratio == f"{here}/my_loss.py:mine"
    assert absolute(config_of("gone.py:mine")).learner.loss.ratio == "gone.py:mine"
    assert absolute(config_of("package.module:mine")).learner.loss.ratio == "package.module:mine"
    Path("venv").mkdir()
    env = {"use": "tools", "args": {"functions": ["my_loss.py:mine", "package.module:mine"], "timeout_s": 3}}
    assert absolute(config_of(env=env)).env.args == {
        "functions": [f"{here}/my_loss.py:mine", "package.module:mine"], "timeout_s": 3
    }  # fmt: skip
    own = {"use": "verifiers", "args": {"python": "venv", "environment": {"id": "venv"}}}
    assert absolute(config_of(env=own)).env.args == {"python": f"{here}/venv", "environment": {"id": "venv"}}
    assert absolute(config_of("clip")).learner.loss.ratio == "clip"


@pytest.mark.long
def test_preflight_tries_it(here: Path) -> None:
    make_tiny_model(here / "tiny")
    Path("data.jsonl").write_text("".join(json.dumps({"question": f"Say {i}"}) + "\n" for i in range(20)))
    prepared = preflight.prepare(config_of())
    assert prepared.config.learner.loss.ratio == f"{here}/my_loss.py:mine"
    assert prepared.config.data.path == f"{here}/data.jsonl"  # gleaner eval --run may be started elsewhere
    assert list(prepared.fingerprints.loss) == ["mine of my_loss.py"]
    Path("wrong.py").write_text("def mine(tokens):\n    return tokens.ratio * float('nan'), tokens.ratio > 2\n")
    with pytest.raises(WrongInput) as caught:
        preflight.prepare(config_of("wrong.py:mine"))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"learner.loss.ratio: {here}/wrong.py:mine must have a finite objective, got [nan, nan,")


def test_a_checkpoint_remembers_the_content_of_the_file(here: Path) -> None:
    folder = here / "checkpoints" / "step-000003"
    folder.mkdir(parents=True)
    Path("tiny").mkdir()
    config = config_of()
    found = fingerprints_of(config, [])
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / FILE).write_text(found.to_json())
    assert fingerprints_of(config_of("clip"), []).loss == {}
    assert check_same_run(config_of(f"{here}/my_loss.py:mine"), found, folder) == []  # another copy of the same file
    Path("my_loss.py").write_text(LOSS.replace("2.0", "3.0"))
    other = fingerprints_of(config, [])
    with pytest.raises(WrongInput, match=r"another content of loss \(mine of my_loss.py\); .*_changed=\[loss\]$"):
        check_same_run(config, other, folder)
    allowed = config_of(resume_allow_changed=["loss"])
    check_allowed(allowed)
    assert check_same_run(allowed, other, folder) == ["content of loss (mine of my_loss.py)"]
    with pytest.raises(WrongInput, match=r"another learner.loss.ratio \(my_loss.py:mine, now my_loss.py:yours\);"):
        check_same_run(config_of("my_loss.py:yours"), found, folder)


def test_a_checkpoint_of_before_has_no_loss_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "inputs.json").write_text('{"data": {}, "rewards": {}, "base": {}}')
    assert Fingerprints.read(tmp_path / "inputs.json").loss == {}


# A chat template that leaves out what a message says is refused, by name, before anything is trained on it.

__all__ = ["config", "model"]  # fixtures

# Phi-3-mini's, as published: it knows no role system.
PHI = (
    "{% for message in messages %}{% if (message['role'] == 'user') %}{{'<|user|>' + message['content'] + '<|end|>' + "
    "'<|assistant|>'}}{% elif (message['role'] == 'assistant') %}{{message['content'] + '<|end|>'}}{% endif %}"
    "{% endfor %}"
)
LAST = "{{ messages[-1].content }}"
REFUSES = "{{ raise_exception('no') if 'said' in messages[0].content }}"
USER, SYSTEM, ANSWER = ("user", "2+2=?"), ("system", "Be brief."), ("assistant", "4")


def conversation(*messages: tuple[str, str]) -> tuple[dict[str, str], ...]:
    return tuple({"role": role, "content": text} for role, text in messages)


def prompt_check_chat_of(template: str | None) -> Chat:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return Chat(tokenizer, EOS_IDS, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("template", "last", "told"),
    [
        (PHI, [SYSTEM, USER], r"role system says, .*; put it into the user's text \(data\.prompt: .*, or give another"),
        (LAST, [USER, ANSWER, USER], "role user says, in a conversation of roles user, assistant, user; take that"),
    ],
)
def test_what_the_template_leaves_out_is_named(template: str, last: list[tuple[str, str]], told: str) -> None:
    with pytest.raises(WrongInput, match=f"^data: the chat template of org/m leaves out what a message of {told}"):
        check_prompts(prompt_check_chat_of(template), "org/m", [conversation(USER), conversation(*last)])


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (PHI, [USER, ANSWER, USER]),
        (PHI, [("system", " "), USER]),  # there is nothing to leave out
        (REFUSES, [USER]),  # only the trial
    ],
)
def test_what_is_written_is_taken(template: str, messages: list[tuple[str, str]]) -> None:
    check_prompts(prompt_check_chat_of(template), "org/m", [conversation(*messages)])


def test_without_a_template_all_is_written() -> None:
    chat = prompt_check_chat_of(None)
    check_prompts(chat, "org/m", [chat.render(conversation(SYSTEM, USER))[0]])


def test_a_start_refuses_a_system_message_that_would_not_be_read(
    config: dict[str, Any], tmp_path: Path, model: Path, no_trials: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(model, tmp_path / "phi")
    (copy / "chat_template.jinja").write_text(PHI)
    assert check(config, "--dry-run", f"model.path={copy}", capsys=capsys)[0] == 0
    code, _, err = check(config, "--dry-run", f"model.path={copy}", "data.system=Be brief.", capsys=capsys)
    assert code == 2
    assert f"data: the chat template of {copy} leaves out what a message of role system says" in err
    turns = [{"role": role, "content": text} for role, text in (SYSTEM, USER)]
    Path("held.jsonl").write_text(json.dumps({"question": turns, "answer": 4}) + "\n")
    code, _, err = check(config, "--dry-run", f"model.path={copy}", "data.eval.path=held.jsonl", capsys=capsys)
    assert (code, "role system says" in err) == (2, True)


def test_routing_is_replayed_of_models_with_experts_alone(
    config: dict[str, Any], no_trials: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = check(config, "--dry-run", "rollout.routing_replay=true", capsys=capsys)
    assert code == 2
    assert "rollout.routing_replay: needs a model with routed experts, and " in err


def test_what_an_environment_begins_with_is_tried_instead(tmp_path: Path) -> None:
    """Which may be the problem's own messages."""
    (tmp_path / "mine.py").write_text(TOOL)
    chat = Chat.load(MODEL)
    chat.tokenizer.chat_template = PHI
    problem = Problem("train-3", conversation(SYSTEM, USER), {"answer": "4"}, (1, 5), 3, 0)
    begins = env_config({"use": FAULTY})
    check_data_prompts(begins, chat, [problem.messages])
    assert check_environment(begins, chat, problem).notes == ()
    with pytest.raises(WrongInput, match="role system says"):
        check_environment(
            env_config({"use": "tools", "args": {"functions": [f"{tmp_path}/mine.py:add"]}}), chat, problem
        )
