"""Where pip was told to look for packages, as environment variables for uv, which reads nothing of pip's configuration:

pip config list | python requirements/uv_settings.py    ->    NAME=value, a line each
"""

import re
import sys

NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_OFFLINE",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "trusted-host": "UV_INSECURE_HOST",
}
LINE = re.compile(rf"^(?:global|install|:env:)\.({'|'.join(NAMES)})='(.*)'$", re.MULTILINE)


def settings(lines: str) -> dict[str, str]:
    """Of what `pip config list` prints. pip separates several by white space, uv find-links by commas."""
    found: dict[str, str] = {}
    for key, value in LINE.findall(lines):
        several = value.replace("\\n", " ").split()
        found[NAMES[key]] = ("," if key == "find-links" else " ").join(several)
    return found


if __name__ == "__main__":
    for name, value in settings(sys.stdin.read()).items():
        print(f"{name}={value}")
