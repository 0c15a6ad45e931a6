"""What the documents say of the repository: files, commands and metrics that are there, and all of the latter. The
README is short, and what it shows works as it stands there. The site of the documents: every page has a place in it,
every link leads somewhere, nothing is fetched elsewhere. Every shipped configuration is one that the program
accepts. The files of examples/clusters: what they start is a command of gleaner's, on the Ray that it wants.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.__main__ import CASES
from benchmarks.common import RESULTS
from learner.config import RunConfig, load
from learner.main import RunRequest, answer, command_of
from learner.tools.init import REWARD

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FOLDERS = (
    "benchmarks",
    "cluster",
    "configs",
    "docs",
    "examples",
    "learner",
    "requirements",
    "rewards",
    "rollout",
    "tests",
)
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
METRIC = r'"((?:buffer|env|eval|loss|memory|policy|reward|rollout|time|value)/[a-z_0-9]+)'


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text)]
    assert [link for link in links if not (document.parent / link).exists()] == []
    paths = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]*)`", text)
    lost = [path for path in paths if not any(ROOT.glob(path.rstrip("/")))]
    assert set(lost) - set(metrics()) == set()  # names of metrics look like paths


def test_every_benchmark_that_is_named_is_a_case_of_a_module_whose_figures_are_there() -> None:
    cases = {case.name: case for case in CASES}
    assert len(cases) == len(CASES)
    for case in CASES:
        module = case.command.split()[0].replace(".", "/")
        assert (ROOT / "benchmarks" / f"{module}.py").is_file(), case
        assert not case.result or (RESULTS / f"{case.result}.md").is_file(), case
    rows = re.findall(r"\| ((?:`\w+`(?:, )?)+) \|$", BENCHMARKS.read_text(), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(named) > 10
    for document in DOCUMENTS:
        named += re.findall(r"python -m benchmarks ([a-z]\w+)", document.read_text())
    assert set(named) - cases.keys() == set()


def test_every_module_of_the_benchmarks_that_is_named_is_there() -> None:
    for document in DOCUMENTS:
        if document.name == "CHANGELOG.md":  # speaks of some that are gone
            continue
        named = set(re.findall(r"\bbenchmarks\.((?:engine|gpu|learner|system)\.\w+|report)\b", document.read_text()))
        lost = [name for name in named if not (ROOT / "benchmarks" / f"{name.replace('.', '/')}.py").is_file()]
        assert lost == [], document.name


def metrics() -> Iterator[str]:
    for package in ("learner", "rollout", "cluster"):
        for file in (ROOT / package).rglob("*.py"):
            yield from re.findall(METRIC, file.read_text())


def explained() -> list[str]:
    """What docs/metrics.md names; `<...>` stands for what a run calls so."""
    return re.findall(r"`([a-z]+/[a-z_0-9]+(?:<\w+>)?)`", (ROOT / "docs" / "metrics.md").read_text())


def test_every_metric_is_explained() -> None:
    known = [name.partition("<")[0] for name in explained()]
    missing = [name for name in set(metrics()) if name not in known]
    assert missing == []


def test_every_key_in_a_document_is_one_of_the_configuration() -> None:
    from learner.config.load import keys

    known = {re.sub(r"\.<i>", "", key.name) for key in keys()}
    groups = {name.rpartition(".")[0] for name in known} | {name.split(".")[0] for name in known}
    for document in DOCUMENTS:
        if document.name == "CHANGELOG.md":  # speaks of keys that were renamed
            continue
        named = re.findall(
            r"`((?:checkpoint|data|guard|learner|memory|model|rollout)\.[a-z_.]+)[:=`]", document.read_text()
        )
        modules = {name for name in named if (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()}
        assert [name for name in named if name not in known | groups | modules] == [], document.name


# The README is short, and what it shows works as it stands there.

TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def test_it_is_an_overview() -> None:
    assert len(TEXT.splitlines()) <= 175


def test_its_configuration_is_one_that_the_program_accepts() -> None:
    (example,) = blocks("yaml")
    assert RunConfig.model_validate(yaml.safe_load(example)).num_steps == 200


def test_its_reward_function_scores() -> None:
    example = blocks("python")[0]
    assert example == REWARD  # which gleaner init writes
    names: dict[str, Any] = {}
    exec(example, names)
    completions = [[{"role": "assistant", "content": text}] for text in ("2 + 2 = 4", "it is 5", "no idea")]
    assert names["accuracy"](prompts=[""] * 3, completions=completions, answer=["4"] * 3) == [1.0, 0.0, 0.0]


def test_its_one_figure_of_speed_is_that_of_the_benchmarks() -> None:
    (figure,) = re.findall(r"gleaner makes ([\d.]+-[\d.]+ times)", TEXT)
    assert all(figure in (ROOT / "docs" / page).read_text() for page in ("benchmarks.md", "comparison.md"))


# The site of the documents: every page has a place in it, every link leads somewhere, nothing is fetched elsewhere.


def build(folder: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-m", "mkdocs", "build", "--config-file", f"{folder}/mkdocs.yml", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.long
def test_a_reader_s_browser_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    assert {"index.html", "trl.html", "SECURITY.html"} <= {page.name for page in pages}
    fetched = [
        (page.name, tag)
        for page, text in pages.items()
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", text)
        if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag)
    ]
    assert fetched == []


@pytest.mark.long
def test_a_page_without_a_place_and_a_link_to_nowhere_fail(tmp_path: Path) -> None:
    for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("docs", "benchmarks/results"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "docs" / "stray.md").write_text("# Stray\n\n[a](nowhere.md) [b](metrics.md#no-such-heading)\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode == 1
    assert 'not included in the "nav" configuration:\n  - stray.md' in built.stderr
    assert "'nowhere.md', but the target is not found" in built.stderr
    assert "does not contain an anchor '#no-such-heading'" in built.stderr
    assert "Aborted with 3 warnings" in built.stdout + built.stderr


# Every shipped configuration is one that the program accepts.

CONFIGS = sorted((Path(__file__).parents[1] / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_shipped_configuration_is_valid(file: Path) -> None:
    config = RunConfig.model_validate(yaml.safe_load(file.read_text()))
    assert config.name != "run"  # two configurations must not share a run folder


# The files of examples/clusters: what they start is a command of gleaner's, on the Ray that it wants.

FOLDER = Path("examples/clusters")


def settings_of(words: list[str]) -> dict[str, Any]:
    """Of `python -m learner.main …`: the settings that it gives, once they are known to be right."""
    assert words[:3] == ["python", "-m", "learner.main"]
    found: list[RunRequest] = []

    def keep(asked: RunRequest) -> int:
        found.append(asked)
        return 0

    assert answer(command_of(RunRequest, keep, "train"), words[3:], "learner.main") == 0
    assert found[0].config is not None
    config = load.load_config("configs/local_cpu.yaml", found[0].overrides or ())
    return {"address": config.cluster.address, "output_dir": config.output_dir, "name": config.name}


def test_the_slurm_script_starts_a_cluster_and_one_run_on_it(tmp_path: Path) -> None:
    for name, prints in (("scontrol", "printf 'n1\\nn2\\n'"), ("srun", "printf '%s\\n' \"$@\"")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{prints}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    ran = subprocess.run(
        [FOLDER / "slurm.sh", "--config", "my.yaml", "output_dir=/shared/my runs", "name=x"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    ray, _, command = ran.stdout.partition("\n--\n")
    assert ray.split() == ["ray", "symmetric-run", "--address", "n1:6379", "--min-nodes", "2"]
    assert settings_of(command.splitlines()) == {"address": "n1:6379", "output_dir": "/shared/my runs", "name": "x"}


def test_the_job_for_kuberay_runs_on_the_ray_of_the_image() -> None:
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())["spec"]
    assert settings_of(shlex.split(job["entrypoint"]))["output_dir"] == "/shared/runs"
    pins = Path("requirements/gpu.txt").read_text().splitlines()  # docker/cuda.Dockerfile installs these
    assert f"ray=={job['rayClusterSpec']['rayVersion']}" in pins
    assert job["rayClusterSpec"]["authOptions"] == {"mode": "token"}  # else anybody who reaches it may run code
