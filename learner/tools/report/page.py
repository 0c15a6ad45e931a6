"""One page out of its parts: the files in `page/`, and data that a browser unpacks. Nothing in it is fetched.

The page's own script and style are named by their digests in its Content-Security-Policy, and nothing else may run or
be asked for: what a model wrote is data, and is shown by textContent only.
"""

import base64
import hashlib
import html
from collections.abc import Iterator, Mapping
from importlib.resources import files

from learner.tools.report.packing import Block

SCRIPTS = (
    "text.js", "blocks.js", "chart.js", "phases.js", "overview.js", "tokens.js", "group.js", "browse.js", "main.js",
)  # fmt: skip


def page(title: str, blocks: Mapping[str, Block], *, live: bool = False) -> Iterator[str]:
    """Pieces of the page's text, in order. blocks: name -> data, found by the page's script under that name.

    live: the script may ask its own server for blocks that are not in the page.
    """
    folder = files("learner.tools.report").joinpath("page")
    style = folder.joinpath("style.css").read_text("utf-8")
    script = "".join(folder.joinpath(name).read_text("utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    policy = [
        "default-src 'none'", f"script-src '{_digest(script)}'", f"style-src '{_digest(style)}'",
        "img-src data:", "base-uri 'none'", "form-action 'none'", *(["connect-src 'self'"] if live else []),
    ]  # fmt: skip
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n"
    )
    body = folder.joinpath("body.html").read_text("utf-8")
    yield body
    first = [name for name in blocks if not name.startswith("step-")]
    yield from (_element(name, blocks[name]) for name in first)  # before the script, which draws while the rest comes
    yield f"<script>{script}</script>\n"
    yield from (_element(name, block) for name, block in blocks.items() if name not in first)
    yield "</body>\n</html>\n"


def _element(name: str, block: Block) -> str:
    return f'<script type="text/plain" id="block-{name}">{block}</script>\n'


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
