"""What the documents say of the repository: files, commands and metrics that are there, and all of the latter."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import CASES
from benchmarks.common import RESULTS

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
