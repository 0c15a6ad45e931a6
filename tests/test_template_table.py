"""tests/template_table.json, hence docs/model_tables.md, says what the installed packages' templates do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.shipped_templates import templates_of
from tests.template_table import RESULTS, installed, rows_of

pytest.importorskip("vllm")


def test_the_rows_of_what_is_installed_are_what_it_gives() -> None:
    found = json.loads(RESULTS.read_text())
    assert len(installed()) == 2
    for name, source in installed().items():
        assert found.get(name) == rows_of(source), f"{name} has other templates: python -m tests.template_table"


def test_no_row_is_exact_and_yet_other_than_the_whole_render() -> None:
    rows = [row for package in json.loads(RESULTS.read_text()).values() for row in package.values()]
    assert len(rows) > 100
    for row in rows:
        agree, of = row["compared"]
        assert agree == of or "varies" in row["verdicts"].values()


def test_templates_are_found_in_folders_and_archives(tmp_path: Path) -> None:
    import tarfile
    import zipfile

    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "kit" / "tests").mkdir(parents=True)
    (tmp_path / "kit" / "one.jinja").write_text(template)
    (tmp_path / "kit" / "grammar.jinja").write_text("{% for rule in rules %}{% endfor %}")
    (tmp_path / "kit" / "processing_two.py").write_text(f"TEMPLATE = {template!r}\nOTHER = 'messages'\n")
    (tmp_path / "kit" / "tests" / "three.jinja").write_text(template)
    with zipfile.ZipFile(tmp_path / "kit.whl", "w") as wheel, tarfile.open(tmp_path / "kit.tar.gz", "w:gz") as archive:
        for file in (tmp_path / "kit").rglob("*.*"):
            wheel.write(file, file.relative_to(tmp_path))
            archive.add(file, file.relative_to(tmp_path))
    for source in ("kit", "kit.whl", "kit.tar.gz"):
        assert templates_of(tmp_path / source) == {"one": template, "processing_two.py": template}
