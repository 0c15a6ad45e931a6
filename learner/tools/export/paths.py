"""Paths of this machine, in a text that others will read: where a folder lies is nobody's concern."""

import re

HOME = r"~(?:[A-Za-z_][\w.-]*)?/+"
NAME = r"[^/\s|;,\"'`](?:[^/\n|;,\"'`]*[^/\s|;,\"'`])?"  # with blanks in it
PROSE = re.compile(r" -|[.!?:] ")  # a command with options, or sentences
WHOLE = re.compile(rf"((?:adapter:|[\w.-]+=)?)(?:file://[\w.-]*)?(?:{HOME}|/+[^/\s]+/+)(?:{NAME}/+)*({NAME})/*")
FOLDER = r"[^/\s\"',;:|`]+/+"
PART = re.compile(rf"(?<![^\s=:,;\"'`(\[{{<|])(?:file://[\w.-]*)?(?:{HOME}|/{FOLDER})(?:{FOLDER})*(?=[^/\s])")


def shortened(text: str) -> str:
    """With each path as the name of what it leads to. Blanks belong to one where the whole text, behind `adapter:` or
    `key=`, is a path; not to its first folder, as a prompt may begin with /no_think."""
    whole = None if PROSE.search(text) else WHOLE.fullmatch(text)
    return PART.sub("", text) if whole is None else whole[1] + whole[2]
