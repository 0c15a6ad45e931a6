"""A contract: what we use of a package, as one version of it has it. Committed as a JSON beside this file.

symbols   dotted name -> its parameters (see tests.contracts.definitions.parameters), null for what is not called.
          Of those with a default only what we pass: a new argument of ours asks for `make contracts`, too.
choices   dotted name of a field -> the values that it takes
requires  what the version itself asks of packages that pyproject.toml bounds
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.contracts.objects import MADE_BY_NAME, ONLY_IN, TEXT
from tests.contracts.source import Source
from tests.contracts.uses import ROOT, Call, Use

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Contract:
    package: str
    version: str
    symbols: dict[str, list[str] | None]
    choices: dict[str, list[object]]
    requires: dict[str, str]

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.package}-{self.version}.json"

    def write(self) -> None:
        self.file.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")

    @classmethod
    def read(cls, file: Path) -> Contract:
        return cls(**json.loads(file.read_text()))


def contracts_of(package: str) -> list[Contract]:
    """Those that are committed, the oldest version first."""
    found = [Contract.read(file) for file in FOLDER.glob(f"{package}-[0-9]*.json")]
    return sorted(found, key=lambda one: Version(one.version))


@cache
def bounds() -> dict[str, SpecifierSet]:
    """Package -> versions that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return {one.name.lower(): one.specifier for one in map(Requirement, lines)}


def symbols_in(source: Source, uses: Sequence[Use], texts: Sequence[str] = ()) -> dict[str, list[str] | None]:
    """Those of our uses that there are. texts: of all files, for names of environment variables."""
    found: dict[str, list[str] | None] = {}
    for symbol in sorted({use.symbol for use in uses}):
        holder, _, name = symbol.rpartition(".")
        known = source.find(symbol)
        if holder.endswith(f".{TEXT}") and any(name in text for text in texts):
            found[symbol] = None
        elif known is not None:
            own = [use.call for use in uses if use.symbol == symbol and use.call is not None]
            found[symbol] = _kept(source.parameters(known), own)
    return found


def choices_in(source: Source, uses: Sequence[Use]) -> dict[str, list[object]]:
    """Of the arguments that we pass by keyword, the values that they take, where the package says."""
    found = {}
    for use in uses:
        for keyword in use.call.keywords if use.call is not None else ():
            field = source.find(f"{use.symbol}.{keyword}")
            choices = None if field is None else source.choices(field)
            if choices is not None:
                found[f"{use.symbol}.{keyword}"] = choices
    return found


def _kept(parameters: list[str] | None, calls: Sequence[Call]) -> list[str] | None:
    if parameters is None or not calls:
        return None
    passed = {keyword for call in calls for keyword in call.keywords}
    first = max(call.positional for call in calls)
    return [
        name
        for index, name in enumerate(parameters)
        if index < first or not name.endswith("=") or name.rstrip("=") in passed
    ]


def breaches(contract: Contract, uses: Iterable[Use]) -> list[str]:
    """What of our uses this version does not have, or would not take; one sentence each."""
    return sorted({told for use in uses for told in _breaches(contract, use)})


def _breaches(contract: Contract, use: Use) -> Iterator[str]:
    version, symbol = f"{contract.package} {contract.version}", use.symbol
    holder, _, name = symbol.rpartition(".")
    if name in MADE_BY_NAME.get(holder, ()):
        return
    if symbol not in contract.symbols:
        if contract.version in ONLY_IN.get(symbol, SpecifierSet()):
            yield f"{version} has no {symbol}, used in {use.where}; of a use that is new: make contracts"
        return
    taken = contract.symbols[symbol]
    if use.call is not None and taken is not None:
        told = ", ".join(taken)
        yield from (f"{version}: {symbol}({told}) {reason}, {use.where}" for reason in _refusals(taken, use.call))


def _refusals(taken: Sequence[str], call: Call) -> Iterator[str]:
    by_position = list(_until_star(taken))
    starred = [name for name in taken if name.startswith("*")]
    names = {name.rstrip("=") for name in taken}
    if call.positional > len(by_position) and not any(name[:2] != "**" and name != "*" for name in starred):
        yield f"takes {len(by_position)} arguments by position, not {call.positional}"
    if not any(name.startswith("**") for name in starred):
        yield from (f"takes no {keyword}" for keyword in sorted(call.keywords - names))
    if call.complete:
        given = {*by_position[: call.positional], *call.keywords}
        yield from (f"asks for {name}" for name in taken if name[-1] != "=" and name[0] != "*" and name not in given)


def _until_star(taken: Sequence[str]) -> Iterator[str]:
    for name in taken:
        if name.startswith("*"):
            return
        yield name.rstrip("=")
