"""The site of the documents: every page has a place in it, every link leads somewhere, nothing is fetched elsewhere."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


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
