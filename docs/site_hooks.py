"""What mkdocs is told beside mkdocs.yml: which files outside of docs/ belong to the site, and where links go there."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md"} | {name: name for name in ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")}
LINK = re.compile(r"(\]\()([^)#:]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages beside docs/, and what the pages link to in benchmarks/results/."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=_rebased((ROOT / name).read_text(), ROOT)))
    for path in sorted((ROOT / "benchmarks" / "results").iterdir()):
        if path.suffix in (".md", ".png"):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(text: str, *, page: Any, config: Any, files: Files) -> str:
    """The page with its links to files outside of docs/ as the site has them."""
    return text if page.file.generated_by else _rebased(text, Path(config["docs_dir"]))


def _rebased(text: str, folder: Path) -> str:
    """`text`, whose links are relative to `folder`, with links relative to the root of the site."""
    return LINK.sub(lambda found: f"{found[1]}{_place(folder, found[2])}{found[3] or ''})", text)


def _place(folder: Path, link: str) -> str:
    """Where the site has the file that a link leads to; of any other file the link as it stands."""
    target = (folder / link).resolve()
    if not target.is_relative_to(ROOT):
        return link
    name = target.relative_to(ROOT).as_posix()
    return PAGES.get(name, name.removeprefix("docs/"))
