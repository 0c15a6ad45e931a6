"""What a node of a cluster has and lacks. On real nodes: tests/nodes. model.revision: every reader of the base gets
the commit that was asked for, from a cache that holds two.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from cluster.config import ClusterConfig, RewardProcessConfig
from cluster.errors import WrongInput
from cluster.ray_cluster import Node
from learner.config import RunConfig
from learner.config.load import absolute, load_config
from learner.driver.identity import FILE, Fingerprints, check_same_run, fingerprints_of
from learner.driver.machine_checks import (
    Needs,
    NodeFacts,
    Wanted,
    downloads,
    lacks,
    look,
    needs,
    placed,
    short_of,
)
from learner.driver.preflight import prepare
from learner.driver.roles import env_settings, worker_spec
from learner.main import main
from learner.model.base import load_base, tensor_files
from learner.tools.eval_command import EvalRequest
from learner.tools.eval_meant import meant
from learner.tools.export.merge import write_tokenizer
from learner.tools.report.page import Words
from rollout.data.chat import Chat
from rollout.data.model_files import model_weights, read_json
from rollout.vllm.arguments import engine_arguments
from tests import hub_cache
from tests.hub_cache import NAME, SEEDS
from tests.learner.checkpoints import commit
from tests.learner.tools.fake_hub import fake_hub

OWN = NodeFacts(
    packages={"Python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.1", "peft": "0.18", "vllm": "0.32.0"},
    sources="a",
    contents={"model.path": {"config.json": "1", "model.safetensors": "2"}, "rewards: mine": {"mine.py": "3"}},
    lock="pid 1",
    shared=2**30,
    disk=2**40,
)
MODEL = {"model.path": "/models/m"}
GENERATOR, LEARNER = Needs("generator", MODEL, {"rewards: mine": "/mine.py"}), Needs("learner", MODEL, {})


def without(names: Mapping[str, str], *left_out: str, **other: str) -> dict[str, str]:
    return {name: text for name, text in names.items() if name not in left_out} | other


def test_a_node_like_the_drivers_lacks_nothing() -> None:
    same = replace(OWN, packages=without(OWN.packages, torch="2.13.0+cu130"))  # a driver without a card is no other
    assert [*lacks(same, OWN, GENERATOR), *lacks(same, OWN, LEARNER)] == []
    assert list(lacks(OWN, replace(OWN, packages=without(OWN.packages, "vllm")), GENERATOR)) == []


def test_each_thing_that_a_node_lacks_is_said_for_the_processes_that_need_it() -> None:
    bare = replace(
        OWN,
        packages=without(OWN.packages, "vllm", peft="0.17"),
        sources="b",
        contents={"model.path": {"config.json": "1", "model.safetensors": "9"}, "rewards: mine": {}},
        lock=None,
    )
    both = [
        "peft 0.17 is installed, the driver has 0.18; install the same on all nodes",
        "its gleaner differs from the driver's; install the same, or submit the job with --working-dir",
        "model.path: /models/m is not what the driver has (model.safetensors differs); copy it again",
    ]
    assert list(lacks(bare, OWN, GENERATOR)) == [
        "vllm is not installed, and a generator needs it",
        *both,
        "rewards: mine: /mine.py is not there; put it on every node, or on a disk that all nodes share",
    ]
    assert list(lacks(bare, OWN, LEARNER)) == [
        *both,
        "output_dir: it does not see the driver's run folder; give a folder on a disk that both share",
    ]


def test_a_hub_model_of_another_commit_is_refused_and_one_that_is_not_cached_is_said() -> None:
    def cached(revision: str) -> NodeFacts:
        return replace(OWN, contents={"model.path": {"revision": revision}})

    hub, missing = Needs("learner", {"model.path": "a/b"}, {}), "a/b, which is not in the cache"
    assert list(lacks(cached("c1"), cached("c2"), hub)) == [
        "model.path: a/b is not what the driver has (revision differs); set model.revision=c2"
    ]
    judge = Needs("reward model", {"rewards: judge": "a/b"}, {})
    there, here = (replace(OWN, contents={"rewards: judge": {"revision": one}}) for one in ("c1", "c2"))
    assert list(lacks(there, here, judge)) == [
        (
            "rewards: judge: a/b is not what the driver has (revision differs); on every node run: "
            "hf download a/b --revision c2, and give the folder that it names"
        )
    ]
    assert [*lacks(cached(missing), cached("c1"), hub), *lacks(cached("c1"), cached(missing), hub)] == []
    assert [*downloads(cached("c1"), hub), *downloads(cached(missing), hub)] == [
        "model.path: a/b is not in its cache, and is downloaded as the learner starts"
    ]


def test_too_little_shared_memory_or_disk_is_said() -> None:
    policy = 384 * 2**20  # two of them and 256 MiB are 1 GiB
    assert list(short_of(OWN, policy)) == []
    assert next(short_of(OWN, policy + 1)).startswith("/dev/shm: 1.0 GiB are free of the 1.0 GiB")
    small = replace(OWN, shared=64 * 2**20, disk=2**30 - 1)
    assert [line.partition(" that ")[0].partition(", where")[0] for line in short_of(small, policy)] == [
        "/dev/shm: 64 MiB are free of the 1.0 GiB",
        "disk: 1024 MiB are free for temporary files",
    ]


def test_an_environment_rewards_alone_beside_a_watch() -> None:
    given = {"model": {"path": "x"}, "data": {"path": "own"}, "env": {"use": "number_guessing"}}
    for rewards, alone in (([], True), ([{"use": "length", "watch": True}], True), (["length"], False)):
        settings = env_settings(RunConfig.model_validate(given | {"rewards": rewards}))
        assert settings is not None
        assert settings.alone == alone


def test_nodes_are_said_with_their_processes() -> None:
    left, right = Node("1", "left (a)"), Node("2", "right (b)")
    assert placed({"learner": left, "generator-0": right, "generator-1": left}) == [
        "placement: node left (a): generator-1, learner",
        "placement: node right (b): generator-0",
    ]


def test_what_is_looked_at_is_what_the_configuration_names(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "mine.py").write_text("def mine(completions): return [0.0] * len(completions)")
    config = RunConfig.model_validate(
        {
            "model": {"path": str(tmp_path / "model"), "adapter": str(tmp_path / "gone")},
            "data": {"path": "d"},
            "rewards": [{"use": f"{tmp_path}/mine.py:mine"}, {"use": "number"}],
        }
    )
    generator, learner = needs(config)
    assert generator.files == {"rewards: mine": f"{tmp_path}/mine.py"}
    assert learner.models == {"model.path": str(tmp_path / "model"), "model.adapter": str(tmp_path / "gone")}
    apart = config.model_copy(update={"cluster": ClusterConfig(rewards=RewardProcessConfig(processes=2))})
    generators, _, scoring = needs(apart)
    assert (generators.files, scoring.files) == ({}, generator.files)
    assert [role.name for role in scoring.roles] == ["rewards-0", "rewards-1"]

    wanted = Wanted({**generator.models, **learner.models}, generator.files, tmp_path / ".lock")
    before = look(wanted)
    assert {setting: list(found) for setting, found in before.contents.items()} == {
        "model.path": ["config.json"], "model.adapter": [], "rewards: mine": ["mine.py"]
    }  # fmt: skip
    assert before.packages["torch"]
    assert before.packages["vllm"]
    assert before.lock is None
    assert 0 < before.shared <= shutil.disk_usage("/dev/shm").total
    assert 0 < before.disk <= shutil.disk_usage(tempfile.gettempdir()).total

    (tmp_path / "mine.py").write_text("def mine(completions): return [1.0] * len(completions)")
    (tmp_path / ".lock").write_text("pid 7")
    after = look(wanted)
    assert after.contents["rewards: mine"] != before.contents["rewards: mine"]
    assert (after.lock, after.sources) == ("pid 7", before.sources)


# model.revision: every reader of the base gets the commit that was asked for, from a cache that holds two.

REWARD = "def ok(prompts, completions, **columns):\n    return [0.5] * len(completions)\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, str]]:
    """Cache, folder of each branch, commits."""
    folder = tmp_path_factory.mktemp("revision")
    return folder / "cache", folder, hub_cache.two_commits(folder / "cache", folder)


@pytest.fixture
def commits(made: tuple[Path, Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    hub_cache.use(made[0], monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path("my_rewards.py").write_text(REWARD)
    Path("data.jsonl").write_text("".join(json.dumps({"question": f"Say {i}"}) + "\n" for i in range(30)))
    return made[2]


def configure(revision: str | None, **changes: Any) -> RunConfig:
    tree = {
        "model": {"path": NAME, "revision": revision, "dtype": "float32"},
        "data": {"path": "data.jsonl"},
        "rewards": [{"use": "my_rewards.py:ok"}],
        "rollout": {"max_prompt_length": 64, "max_completion_length": 16},
    }
    Path("config.yaml").write_text(yaml.safe_dump(tree | changes))
    return load_config("config.yaml", [])


@pytest.mark.parametrize("branch", SEEDS)
def test_every_reader_gets_the_commit_that_a_branch_stands_for(
    branch: str, commits: dict[str, str], made: tuple[Path, Path, dict[str, str]], tmp_path: Path
) -> None:
    folder, own, context = made[1] / branch, commits[branch], 256 * SEEDS[branch]
    prepared = prepare(configure(branch))
    config = prepared.config
    assert (config.model.path, config.model.revision) == (NAME, own)
    assert prepared.fingerprints.base == {"revision": own}

    settings = worker_spec(config, 0, prepared.budgets).engine
    arguments = engine_arguments(settings, cuda=False)
    assert [arguments[name] for name in ("model", "revision", "tokenizer_revision")] == [NAME, own, own]
    for source in (settings.model, configure(branch).model.source):
        assert Chat.load(source).context == context
        assert Chat.load(source).tokenizer.chat_template.startswith("{# old #}") == (branch == "old")

    weights = load_file(folder / "model.safetensors")
    for model in (config.model, *([configure(None).model] if branch == "main" else [])):
        read = load_base(model, torch.device("cpu"), lora=True).state_dict()
        assert all(torch.equal(read[name], weight) for name, weight in weights.items())
    found = tensor_files(config.model.source)
    assert {file.parent.name for file, _ in found.values()} == {own}
    assert found.keys() == (model_weights(config.model.source) or {}).keys() == weights.keys()
    write_tokenizer(config.model.source, tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == (folder / "chat_template.jinja").read_text()
    assert Words(config.model.source).known


def test_nodes_look_for_the_commit_of_the_driver(commits: dict[str, str]) -> None:
    config = absolute(configure("old"))
    models = needs(config)[0].models
    facts = look(Wanted(models, {}, Path("lock")))
    assert facts.contents == {"model.path": {"revision": commits["old"]}}
    (elsewhere,) = models.values()
    gone = elsewhere.replace(commits["old"], "7" * 40)  # a commit that this cache has not, beside those of others
    (content,) = look(Wanted({"model.path": gone}, {}, Path("lock"))).contents.values()
    assert content == {"revision": f"{gone}, which is not in the cache"}


def test_a_run_goes_on_with_another_name_of_the_same_commit(commits: dict[str, str]) -> None:
    def inputs(revision: str | None) -> tuple[RunConfig, Fingerprints]:
        config = absolute(configure(revision))
        return config, fingerprints_of(config, [])

    config, found = inputs("main")
    commit(config.run_dir / "checkpoints", 3, {"config.json": config.model_dump_json(), FILE: found.to_json()})
    folder = config.run_dir / "checkpoints" / "step-000003"
    for same in (None, "main", commits["main"]):
        assert check_same_run(*inputs(same), folder) == []
    with pytest.raises(WrongInput, match=r"was made with another content of base \(revision\)"):
        check_same_run(*inputs("old"), folder)


def test_another_model_has_no_revision_of_the_one_that_it_replaces(commits: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    configure("old", model={"path": NAME, "revision": "old"})
    Path("config.yaml").rename(run / "config.yaml")
    config, _ = meant(EvalRequest(run_folder=run, model=str(tmp_path)))
    assert (config.model.path, config.model.revision) == (str(tmp_path), None)
    config, _ = meant(EvalRequest(run_folder=run, model=NAME))
    assert config.model.revision == "old", "the same model keeps it"
    (run / "model").mkdir()
    (run / "model" / "config.json").touch()
    config, _ = meant(EvalRequest(run_folder=run))
    assert (config.model.path, config.model.revision) == (str(run / "model"), None)


MISSING = {  # whether the hub can be asked, and what is said
    "a revision that the cache has not": (
        False,
        (
            "must be one of org/tiny that is in the cache, since the hub cannot be reached, got gone; download it "
            "first (hf download org/tiny --revision gone), or give one that is there"
        ),
    ),
    "a revision that the hub has not": (
        True,
        (
            "must be a branch, tag or commit of the hub's org/tiny, which has no gone; choose one on the model's page "
            "(Files and versions), or leave it out for the newest"
        ),
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_is_not_there_is_one_line(case: str, commits: dict[str, str]) -> None:
    online, sentence = MISSING[case]
    configure("gone")
    with fake_hub() as hub:
        settings = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"} if online else {}
        told = subprocess.run(
            [sys.executable, "-m", "learner.main", "--config", "config.yaml"],
            capture_output=True, text=True, env={**os.environ, **settings}, timeout=120,
        )  # fmt: skip
    assert (told.returncode, told.stderr) == (2, f"error: model.revision: {sentence}\n")


def test_without_the_hub_a_file_that_a_cached_commit_lacks_is_none_of_the_model(commits: dict[str, str]) -> None:
    assert read_json(f"{NAME}@old", "preprocessor_config.json") == read_json(NAME, "preprocessor_config.json") == {}
    with pytest.raises(
        WrongInput, match="^model.path: org/other is neither a folder here nor a hub model in the cache"
    ):
        read_json("org/other", "preprocessor_config.json")


@pytest.mark.long
def test_a_dry_run_tries_the_commit_as_learner_and_generator_would(
    commits: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    configure("old", rollout={"max_prompt_length": 200, "max_completion_length": 100})
    assert main(["--config", "config.yaml", "--dry-run"]) == 2
    assert "must be at most the model's context of 256 tokens, got 300" in capsys.readouterr().err
    configure("old")
    assert main(["--config", "config.yaml", "--dry-run", "--verbose"]) == 0
    assert f"\n  revision: {commits['old']}\n" in capsys.readouterr().out
