"""Keys of earlier versions: who writes one is told its new name, and what runs have recorded means what it meant.
The door: what is right comes through whole, and everything that is wrong is said at once, with its place. The door
under attack: whatever a file or an override holds, it ends in one sentence.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import Deadlines
from cluster.errors import WrongInput
from gleaner import InputError, train
from learner.config import RunConfig
from learner.config.load import MOVED, keys, load_config, parse_value, recorded, to_yaml
from learner.driver.identity import config_of
from learner.tools.replay.recorded import load_config as replayed
from rewards.config import masked
from rollout.config import RolloutConfig
from rollout.env.config import EnvConfig

BEFORE = Path(__file__).with_name("recorded_before.json")  # of a run of before, many of whose settings are no defaults
NEEDED = ["model.path=m", "data.path=d", "rewards=[{use: format}]"]


def before() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BEFORE.read_text())
    return found


SAME_AS_ANOTHER = {
    "learner.loss.epsilon", "learner.loss.delta", "cluster.deadlines.start", "cluster.deadlines.step",
    "cluster.deadlines.heartbeat",
}  # fmt: skip


def told(*overrides: str) -> list[str]:
    with pytest.raises(WrongInput) as caught:
        load_config(None, [*NEEDED, *overrides])
    return str(caught.value).splitlines()


TOLD = [  # an override, and the ends of the line that it gets
    ("learner.loss.band=[0.5, 3]", "write learner.loss.bounds.band=[0.5, 3] (got [0.5, 3])"),
    ("learner.loss.cap=null", "leave it out (got None)"),
    ("cluster.deadlines.group=1800", "write cluster.patience=2.0 (got 1800)"),
    ("cluster.deadlines.push=60", "write cluster.patience=0.5 (got 60)"),
    ("env.timeout_s=600", "write cluster.patience=2.0 (got 600)"),
    ("env.timeout_s=long", "is a third of what one group may take now, by cluster.patience (got 'long')"),
    ("env.start_timeout_s=120", "write env.step_timeout_s=60.0 (got 120)"),
    ("env.start_timeout_s=9", "leave it out (got 9)"),
    ("env.memory=8GiB", "write rollout.process_memory=8589934592 (got '8GiB')"),
    ("env.memory=1GiB", "leave it out (got '1GiB')"),
    ("rollout.reward_memory=8GiB", "write rollout.process_memory=8GiB (got '8GiB')"),
    ("learner.offload_boundaries=true", "write learner.checkpointing=offloaded (got True)"),
    ("learner.offload_boundaries=false", "leave it out (got False)"),
    ("memory.base=shared", "write memory.layout=shared (got 'shared')"),
    ("memory.base=own", "leave it out (got 'own')"),
    ("memory.learner=6GiB", "leave it out (got '6GiB')"),
    ("memory.generator=6GiB", "leave it out (got '6GiB')"),
    ("guard.steps=7", "leave it out (got 7)"),
]


@pytest.mark.parametrize(("override", "end"), TOLD)
def test_an_old_key_is_told_its_new_name_and_value(override: str, end: str) -> None:
    (line,) = told(override)
    assert line.startswith(f"{override.partition('=')[0]}: ")
    assert line.endswith(f" {end}")


def test_so_it_is_in_a_file_with_each_key_of_a_section_and_in_python(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("learner: {loss: {cap: 3, delta: 2}}\nguard: {mismatch: 1}\n")
    with pytest.raises(WrongInput) as caught:
        load_config(str(file), NEEDED)
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["learner.loss.cap", "learner.loss.delta", "guard.mismatch"]
    with pytest.raises(InputError, match=r"^learner.loss.cap: .* write learner.loss.bounds.cap=3 \(got 3\)$"):
        train(model="m", dataset="d.jsonl", rewards=["format"], learner={"loss": {"cap": 3}})


def test_no_key_of_today_is_among_them_and_each_leads_to_one_of_today() -> None:
    today = {key.name for key in keys()}
    assert {moved.key for moved in MOVED} & today == set()
    assert {override.partition("=")[0] for override, _ in TOLD} >= {moved.key for moved in MOVED} - SAME_AS_ANOTHER
    leads = {found[0] for moved in MOVED if (found := moved.value(2**31)) is not None}
    assert {name.partition("bounds.")[0] + "bounds" * ("bounds." in name) for name in leads} <= today


def test_a_recorded_configuration_means_what_it_meant() -> None:
    config = recorded(before())
    assert config.learner.loss.bounds == {"band": (0.25, float("inf"))}
    assert (config.memory.layout, config.memory.device) == ("shared", 24 * 2**30)
    assert (config.cluster.patience, config.trajectory_s) == (2.0, 600)
    assert config.cluster.deadlines == Deadlines(start=1200, group=1800, step=7200, push=240, heartbeat=600)
    assert (config.env.step_timeout_s, config.env.start_timeout_s) == (60, 120)
    assert (config.rollout.reward_memory, config.rollout.environment_memory) == (8 * 2**30, 8 * 2**30)
    assert (config.learner.checkpointing, config.guard.mismatch_k3) == ("offloaded", 0.02)


def test_what_was_the_default_is_that_of_today() -> None:
    old = before()
    old["memory"] |= {"base": "own", "generator": "auto", "learner": "auto"}
    old["cluster"]["deadlines"] = {"start": 600.0, "group": 900.0, "step": 3600.0, "push": 480.0, "heartbeat": 30.0}
    old["env"] |= {"start_timeout_s": 60.0, "timeout_s": 300.0, "memory": 2**30}
    old["learner"] |= {"offload_boundaries": False}
    old["guard"] = {"mismatch_k3": 0.01, "steps": 5}
    config = recorded(old)
    assert config.memory.layout == "auto"
    assert config.cluster == RunConfig.model_fields["cluster"].default.model_copy(update={"gpus": config.cluster.gpus})
    assert config.env == EnvConfig(use="tools")
    assert config.rollout == RolloutConfig()
    assert config.learner.checkpointing == "full"


def test_no_limit_gets_smaller() -> None:
    env = {"use": "number_guessing", "step_timeout_s": 5, "start_timeout_s": 60}
    short = recorded(before() | {"env": env, "rollout": {"reward_memory": 2**29}})
    assert (short.env.start_timeout_s, short.rollout.environment_memory) == (60, 2**30)
    texts = {"env": env | {"memory": "2GiB"}, "rollout": {"reward_memory": "8GiB"}}
    assert recorded(before() | texts).rollout.reward_memory == 8 * 2**30


def test_what_can_not_be_read_is_refused_in_one_line() -> None:
    with pytest.raises(WrongInput, match=r"^cluster.deadlines.start: "):
        recorded(before() | {"cluster": {"deadlines": {"start": 10**400}}})
    with pytest.raises(WrongInput, match=r"^env.memory: not a size"):
        recorded(before() | {"env": {"use": "tools", "memory": "much"}})
    with pytest.raises(WrongInput, match=r"^config: must be a mapping, got list"):
        recorded([])


def test_an_old_run_folder_is_resumed_and_replayed_by_what_it_recorded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(BEFORE.read_text())
    file = tmp_path / "config.yaml"
    file.write_text(BEFORE.read_text().replace("Infinity", ".inf"))
    with pytest.raises(WrongInput, match="learner.loss.band: is an argument"):
        load_config(str(file), ())  # of nobody's run: there are no metrics
    (tmp_path / "metrics.jsonl").touch()
    assert config_of(tmp_path) == replayed(tmp_path, ()) == load_config(str(file), ()) == recorded(before())
    with pytest.raises(InputError) as caught:
        train(config=str(file))  # from Python, too: nothing is said of its old keys
    assert "now" not in str(caught.value)
    assert replayed(tmp_path, ["learner.loss.bounds={}"]).learner.loss.bounds == {}
    with pytest.raises(WrongInput, match="learner.loss.band: is an argument"):
        replayed(tmp_path, ["learner.loss.band=[0.5, 3]"])


# The door: what is right comes through whole, and everything that is wrong is said at once, with its place.

CONFIG_IO_NEEDED = ["model.path=m", "data.path=d", "rewards=[{use: a}, {use: b, weight: 2}]"]

FILE = """
model: {path: Qwen/Qwen2.5-0.5B-Instruct}
data: {path: train.jsonl, prompt: "Solve: {question}"}
rewards:
  - {use: format, weight: 0.5}
  - {use: accuracy}
rollout: {kv_cache: 64MiB}
"""


def refusal(*overrides: str, path: Path | None = None) -> list[str]:
    """The lines of the error."""
    with pytest.raises(WrongInput) as caught:
        load_config(None if path is None else str(path), [*(CONFIG_IO_NEEDED if path is None else []), *overrides])
    return str(caught.value).splitlines()


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_a_file_with_overrides_on_top(tmp_path: Path) -> None:
    path = write(tmp_path, FILE)
    overrides = [
        "--learner.learning_rate=1e-4",
        "rewards.1.weight=3",
        "learner.loss.bounds={epsilon: [0.1,1]}",
        "learner.loss.ratio=clip",
    ]
    config = load_config(str(path), [*overrides, "data.prompt=Q: {question}"])
    assert config.learner.learning_rate == 1e-4  # YAML 1.1 reads 1e-4 as text
    assert config.learner.loss.bounds == {"epsilon": (0.1, 1.0)}
    assert [(r.use, r.weight) for r in config.rewards] == [("format", 0.5), ("accuracy", 3.0)]
    assert (config.data.prompt, config.data.path) == ("Q: {question}", "train.jsonl")
    assert config.rollout.kv_cache == 64 * 2**20
    assert config.num_steps == 60


def test_every_mistake_is_said_at_once_with_rule_value_and_nearest_key(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model: {pth: x}\nrewards: [{use: a, wieght: 2}]\nlearner: {learning_rate: -1, loss: {kind: ppo}}\nfoo: 1\n",
    )
    said = refusal("rollout.num_generations=0", path=path)
    assert set(said) >= {
        "model.path: required, but not given",
        "model.pth: unknown key; did you mean path?",
        "data: required, but not given",
        "rewards.0.wieght: unknown key; did you mean weight?",
        "rollout.num_generations: Input should be greater than or equal to 1 (got 0)",
        "learner.learning_rate: Input should be greater than 0 (got -1)",
        "learner.loss.kind: Input should be 'dapo', 'dr_grpo' or 'grpo' (got 'ppo')",
    }
    (foo,) = [line for line in said if line.startswith("foo")]
    assert foo.startswith("foo: unknown key; known here: checkpoint, cluster, data,")
    assert len(said) == 8


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("steps", "'steps': an override is written key=value; did you mean steps=...?"),
        (
            "--learner.lora.rank",
            "'--learner.lora.rank': an override is written key=value; did you mean learner.lora.rank=...?",
        ),
        ("--bogus", "'--bogus': an override is written key=value, for example learner.learning_rate=1e-4"),
        ("my.yaml", "'my.yaml': an override is written key=value; did you mean --config my.yaml?"),
        ("--dryrun", "'--dryrun': an override is written key=value; did you mean --dry-run?"),
        ("rewards.2.weight=1", "rewards.2.weight: '2' must be an index below 2 into a list"),
        ("rewards.x.weight=1", "rewards.x.weight: 'x' must be an index below 2 into a list"),
        ("model.path.deep=1", "model.path.deep: model.path is a str, it has no keys"),
        ("rollout={workers: 1, workers: 2}", "rollout: workers: given twice in one block (line 1)"),
        ("name=../elsewhere", r"name: String should match pattern"),
        (
            "model.revision=''",
            "model.revision: must name a branch, tag or commit, or be left out for the newest (got '')",
        ),
        ("rollout.kv_cache=12 parsecs", "rollout.kv_cache: not a size: '12 parsecs'; write for example 256MiB"),
        ("learner.lora.rank=17", "learner.lora.rank: Input should be 1, 2, 4, 8, 16, 32, 64, 128 or 256 (got 17)"),
        ("learner.learning_rate=.nan", "learner.learning_rate: Input should be a finite number (got nan)"),
        (
            "learner.loss.bounds.band=[0.5,.nan]",
            "learner.loss.bounds.band.1: Input should be greater than or equal to 1 (got nan)",
        ),
        (
            "learner.checkpointing=0",
            "learner.checkpointing: Input should be 'none', 'full', 'mlp', 'offloaded' or 'auto', or greater than or",
        ),
        ("env.concurrency=few", "env.concurrency: Input should be a valid integer, unable to parse string as an integ"),
        ("cluster.gpus=0.5", "cluster.gpus: must be given key by key (generator, learner, teacher); write for example"),
        ("early_stop=3", "early_stop: must be given key by key (accuracy, patience); write for example early_stop.acc"),
        (r"learner.lora.targets=.*\.(q|v)_proj", "learner.lora.targets: must be all-linear, or a list of the ends of"),
        ("learner.lora.targets=[]", "learner.lora.targets: must be all-linear, or a list of the ends of layers' names"),
    ],
)
def test_one_mistake_one_sentence(override: str, sentence: str) -> None:
    (said,) = refusal(override)
    assert said.startswith(sentence)


def test_a_key_of_other_programs_says_why_there_is_none() -> None:
    (said,) = refusal("rollout.oversample=2")
    assert said.startswith("rollout.oversample: there is no such key: running ahead gives more")
    assert load_config(None, [*CONFIG_IO_NEEDED, "epochs=1"]).num_steps is None


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("learner.kl_coef=0.1", "docs/trl.md has for it: learner.loss.beta"),
        ("random_state=3407", "docs/trl.md has for it: seed"),
        ("learner.lora.alpha_pattern={q_proj: 8}", "docs/trl.md says of PEFT's: not here: all layers have one alpha"),
        ("learner.use_rslora=true", "docs/trl.md says of PEFT's: learner.lora.alpha, multiplied by the square root"),
        ("learner.lora.rnk=8", "did you mean rank?"),
    ],
)
def test_a_name_of_other_programs_is_told_its_place(override: str, place: str) -> None:
    (said,) = refusal(override)
    assert said.startswith(f"{override.partition('=')[0]}: unknown key; {place}")


def test_a_band_without_upper_end_is_kept_as_it_is_written(tmp_path: Path) -> None:
    config = load_config(None, [*CONFIG_IO_NEEDED, "learner.loss.bounds.band=[0.25,.inf]"])
    assert config.learner.loss.bounds["band"] == (0.25, float("inf"))
    assert load_config(str(write(tmp_path, to_yaml(config))), []) == config


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("seed: 1\nmodel: {path: x}\nseed: 2\n", "seed: given twice in one block (line 1)"),
        ("- a\n- b\n", "must be a mapping of keys, got list"),
        ("a: [1\n", "not YAML"),
        ("{[1, 2]: 3}\n", "not YAML"),
    ],
)
def test_a_file_that_is_not_a_configuration(tmp_path: Path, text: str, sentence: str) -> None:
    (said,) = refusal(path=write(tmp_path, text))
    assert sentence in said


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "absent.yaml"
    assert refusal(path=path) == [f"--config {path}: No such file or directory; the ready-made ones are in configs/"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("1e-3", 0.001),
        ("true", True),
        ("", None),
        ("null", None),
        ("[a, 1]", ["a", 1]),
        ("{a: 1}", {"a": 1}),
        ("'3'", "3"),
        ("Solve: {question}", "Solve: {question}"),
        ("- {question}", "- {question}"),
        ("End with #### and a number", "End with #### and a number"),  # the rest would be a comment
        ("#### then", "#### then"),
        ("2024-01-31", "2024-01-31"),
        ("{question} = ?", "{question} = ?"),
    ],
)
def test_text_on_the_command_line_stays_as_it_stands(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_where_text_alone_is_wanted_nothing_else_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, FILE)
    given = ["name=2024", "data.prompt={question}", "data.split=true", "data.eval.split='a b'", "data.system=null"]
    config = load_config(str(path), [*given, "rewards=[number]", "rewards.0.args.tol=1e-3", "rewards.0.name=7"])
    assert (config.name, config.data.prompt, config.data.split) == ("2024", "{question}", "true")
    assert (config.data.eval.split, config.data.system) == ("a b", None)
    assert [(r.use, r.name, r.args) for r in config.rewards] == [("number", "7", {"tol": 0.001})]


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("learner.checkpointing=true", "must be none or full or mlp or offloaded or auto or a number (got True)"),
        ("steps=true", "must be a number (got True)"),
        ("learner.learning_rate=false", "must be a number (got False)"),
        ("cluster.gpus.generator=true", "must be a number (got True)"),
        ("learner.optimizer.betas=[false,0.9]", "must be a number (got [False, 0.9])"),
        ("rewards.0.timeout_s=true", "must be a number (got True)"),
    ],
)
def test_true_is_no_number(override: str, rule: str) -> None:
    assert refusal(override) == [f"{override.partition('=')[0]}: {rule}"]


def test_a_wrong_value_is_shown_in_part() -> None:
    (said,) = refusal(f"steps=[{', '.join(['abc'] * 300)}]")
    assert len(said) < 160
    (said,) = refusal("steps=3", "epochs=1")
    assert "{" not in said  # of a rule between keys, not the whole configuration
    (said,) = refusal("memory.device=24")
    assert said == "memory.device: must be a size of at least 1MiB, got 24 bytes; write the unit, for example 24GiB"


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
WHOLE = st.integers(-(2**63), 2**63)  # what a configuration may hold


@given(
    seed=st.integers(0, 2**31 - 1),
    rate=st.floats(1e-12, 1e3),
    prompt=TEXT,
    args=st.dictionaries(TEXT, TEXT | WHOLE | st.booleans() | st.none(), max_size=3).filter(lambda a: masked(a) == a),
    weight=st.floats(-1e6, 1e6),
    size=st.none() | st.integers(1, 10**6),
)
def test_what_is_written_beside_a_run_is_the_run(tmp_path_factory: Any, **drawn: Any) -> None:
    given_tree = {
        "seed": drawn["seed"],
        "model": {"path": "m"},
        "data": {"path": "d", "prompt": drawn["prompt"], "args": drawn["args"], "size": drawn["size"]},
        "rewards": [{"use": "vowels", "weight": drawn["weight"]}],
        "learner": {"learning_rate": drawn["rate"], "token_budget": 4096},
    }
    config = RunConfig.model_validate(given_tree)
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(str(path), []) == config


LIGHT = """
import json, sys
from learner.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
loaded = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "vllm", "ray", "transformers", "datasets"})
print(json.dumps([code, loaded]))
"""


FREE = [
    "rewards.1.args={cap: .inf, per: {low: [-.inf, {x: .nan}], 3: three}, since: 2025-02-03}", "data.args.q=-.INF",
    "env.use=t.py:make", "env.args={a: [[.NaN]]}", "data.chat_template_kwargs={z: .inf}", "learner.push=adapter",
]  # fmt: skip


def test_free_arguments_come_back_from_the_file_of_a_run_as_they_were(tmp_path: Path) -> None:
    """By default pydantic writes null for what is not finite, and text for a date or a key that is a number."""
    config = load_config(None, [*CONFIG_IO_NEEDED, *FREE])
    again = load_config(str(write(tmp_path, to_yaml(config))), [])
    assert repr(again.model_dump()) == repr(config.model_dump())
    assert repr(again.rewards[1].args) == (
        "{'cap': inf, 'per': {'low': [-inf, {'x': nan}], 3: 'three'}, 'since': datetime.date(2025, 2, 3)}"
    )
    stored = RunConfig.model_validate_json(config.model_dump_json())  # as a checkpoint has it
    assert repr(
        [stored.rewards[1].args["cap"], stored.data.args, stored.env.args, stored.data.chat_template_kwargs]
    ) == ("[inf, {'q': -inf}, {'a': [[nan]]}, {'z': inf}]")


@pytest.mark.parametrize(
    "text",
    ["a: " + "1:" * 50_000 + "1", "a: 0." + "7" * 5000, "- " * 3000 + "a", "a: " + "[" * 60_000, "a: &b {c: *b}"],
)
def test_a_file_that_would_take_minutes_or_the_process_is_refused(tmp_path: Path, text: str) -> None:
    assert len(refusal(path=write(tmp_path, text))) == 1


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--help"], 0, "--keys              List every key with its choices and default.\n"),
        (["--keys"], 0, "  learner.lora.rank = 16  (1 | 2 | 4 | 8 | 16 | 32 | 64 | 128 | 256)\n"),
        ([], 2, "config: --config: required, but not given; gleaner init my-run writes a first one\n"),
        (["--confg", "my.yaml"], 2, "config: '--confg': an override is written key=value; did you mean --config?\n"),
        (["model.path=x", "rollouts.workers=2"], 2, "config: rollouts: unknown key; did you mean rollout?\n"),
    ],
)
def test_help_and_refusal_load_nothing_heavy(words: list[str], code: int, text: str) -> None:
    """Ctrl-C in a slow import is how a first try ends."""
    ran = subprocess.run([sys.executable, "-c", LIGHT, *words], capture_output=True, text=True, timeout=120)
    assert json.loads(ran.stdout.splitlines()[-1]) == [code, []]
    assert text in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("name", ["/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"])
def test_a_pipe_that_the_command_was_started_with_is_a_file(name: str) -> None:
    """As learner.train starts a run, and a shell writes <(...)."""
    script = (
        "import sys; from learner.config.load import load_config; print(load_config(sys.argv[1], []).rollout.kv_cache)"
    )
    command = [sys.executable, "-c", script, name]
    ran = subprocess.run(command, input=FILE, text=True, capture_output=True, timeout=60)
    assert ran.stdout == f"{64 << 20}\n", ran.stderr
    ran = subprocess.run(command, input="#" * 600_000, text=True, capture_output=True, timeout=60)
    assert f"--config: {name} must have at most 0.5 MiB, and has more" in ran.stderr


# The door under attack: whatever a file or an override holds, it ends in one sentence.

# What a file or a command line may hold, tuned to YAML's own signs: brackets, anchors, tags, dates, numbers.
HOSTILE = st.lists(
    st.sampled_from(
        ["[", "]", "{", "}", ":", ",", "&a ", "*a", "!!int ", "!!python/name:os ", "- ", "#", "'", '"', "|\n"]
    )
    | st.sampled_from(
        ["9" * 5000, "2024-99-99", "0x" + "f" * 40, "1e999", ".inf", "1:99:99", "~", "\0", "\ud800", "\n"]
    )
    | st.text(max_size=4),
    max_size=12,
).map("".join)
KEYS = st.sampled_from(
    ["model", "path", "data", "args", "rewards", "0", "use", "rollout", "kv_cache", "steps", "", "²"]
)


def what_is_said(path: str | None, overrides: list[str]) -> str | None:
    """What is said of a configuration that is refused; any exception but WrongInput goes on to the test."""
    try:
        load_config(path, overrides)
    except WrongInput as error:
        return str(error)
    return None


@given(overrides=st.lists(st.tuples(st.lists(KEYS, min_size=1, max_size=4), HOSTILE), max_size=3))
def test_no_override_ends_in_anything_but_a_sentence(overrides: list[tuple[list[str], str]]) -> None:
    assert what_is_said(None, [*CONFIG_IO_NEEDED, *(f"{'.'.join(keys)}={value}" for keys, value in overrides)]) != ""


@given(text=HOSTILE)
def test_no_file_ends_in_anything_but_a_sentence(tmp_path_factory: Any, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert what_is_said(str(path), CONFIG_IO_NEEDED) != ""


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("name: \xe9t\xe9\n".encode("latin-1"), "must be UTF-8 text, got the byte 0xe9 at 6; give a YAML file"),
        (b"steps: " + b"9" * 10_000, "a number must have at most 400 letters"),
        (b"data: " + b"[" * 5000 + b"]" * 5000, "lists and mappings must be nested at most 32 deep"),
        (b"data: " + b"[" * 40 + b"]" * 40, "lists and mappings must be nested at most 32 deep"),
        (b"data: {args: &all {again: *all}}", "lists and mappings must be nested at most 32 deep"),
        (LAUGHS.encode(), "must hold at most 100000 values, aliases counted as often as they are used"),
        (b"seed: 2024-99-99", "not YAML: month must be in 1..12"),
        (b'name: "a\\0b"', "text must not hold a null character"),
        (
            b"rewards: [{use: f.py:f, args: {v: !!binary /w==}}]",
            "rewards.0.args.v: must not be bytes (!!binary), got b'\\xff'; write it as text",
        ),
        (b"data: {args: {? !!binary aGk= : 1}}", "data.args.b'hi': must not be bytes (!!binary), got b'hi'"),
        (b"steps: 99999999999999999999", "a whole number must lie within 64 bits"),
    ],
)
def test_a_hostile_file_is_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    (said,) = refusal(path=path)
    assert said.startswith((f"--config {path}: {sentence}", f"--config: {path} {sentence}"))
