"""Reads a run's configuration: a YAML file and dotted overrides become a RunConfig. All mistakes are reported at once,
each with field, rule, value and next step. Also translates keys of earlier versions, and makes paths absolute."""

import copy
import difflib
import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from cluster.config import Deadlines
from cluster.errors import WrongInput
from cluster.machine import usable_cards
from cluster.reading import dump, parse_value, read_yaml
from cluster.telemetry import METRICS_FILE
from learner.config import ModelConfig, RunConfig
from learner.config.arrangement import with_cards
from rewards.base import ADAPTER
from rewards.config import RewardConfig, classifier_of, masked
from rewards.functions import SUFFIX
from rewards.limits import DEFAULT_MEMORY as DEFAULT_REWARD_MEMORY
from rollout.config import DEFAULT_ENVIRONMENT_MEMORY, OWN_ROLLOUTS, parse_size
from rollout.data.model_files import commit_of, hub_file
from rollout.env.config import EnvConfig
from rollout.env.host import NAMES, PATHS

TRL_FILE = Path(__file__).with_name("trl_places.json")  # tests/trl_places.py makes it from docs/trl.md


def place_of(argument: str) -> str | None:
    """What docs/trl.md says about an argument of TRL's GRPOTrainer or GRPOConfig; None for any other word."""
    places: dict[str, str] = json.loads(TRL_FILE.read_text(encoding="utf-8"))
    return places.get(argument)


# What docs/trl.md says about PEFT's fields and about settings of other programs, for errors about such keys.

PEFT_FILE = Path(__file__).with_name("other_names.json")  # tests/trl_places.py makes it from docs/trl.md
NOT_HERE = "not here: "


@cache
def _places() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(PEFT_FILE.read_text(encoding="utf-8"))
    return found


def of_peft(field: str) -> str | None:
    """The counterpart of a field of PEFT's LoraConfig, or `not here: ` and the reason; None for any other word."""
    return _places()["peft"].get(field)


def why_not(field: str) -> str | None:
    """The reason why a field of PEFT's LoraConfig has no counterpart; None if it has one, and for any other word."""
    place = of_peft(field) or ""
    return place.removeprefix(NOT_HERE) if place.startswith(NOT_HERE) else None


def of_others(name: str) -> str | None:
    """The setting that corresponds to this name in other programs; None for any other word."""
    return _places()["others"].get(name)


__all__ = [
    "Key", "assign", "describe", "keys", "load_config", "parse_value", "sentences", "to_yaml",
    "validated",
]  # fmt: skip

OVERSAMPLE = (
    "running ahead gives more where completions differ in length; set max_staleness=1 and rollout.in_flight=continue"
)
# Key of other programs -> why gleaner has no such key.
NONE_HERE = {"oversample": OVERSAMPLE}

# Keys of earlier versions. A user who writes one gets an error with today's key; in a run folder it is translated.


@dataclass(frozen=True, slots=True)
class Moved:
    """A key of earlier versions that has moved or is gone.

    key: the dotted key. now: clause that says where the key went. value: old value -> today's (key, value), or None
    where the old value means what is done anyway. settled: whether a recorded value was computed by a plan, so that it
    is not translated.
    """

    key: str
    now: str
    value: Callable[[Any], tuple[str, Any] | None] = lambda _: None
    settled: bool = False

    def sentence(self, given: Any) -> str:
        """The error's text: field, rule, next step, value."""
        try:
            found = self.value(given)
        except (TypeError, ValueError, ArithmeticError):  # the value was not valid for the old key either
            return f"{self.key}: {self.now} (got {_shown(given)})"
        mend = "leave it out" if found is None else f"write {found[0]}={_as_written(found[1])}"
        return f"{self.key}: {self.now}; {mend} (got {_shown(given)})"


def _same(key: str, old: Any = None) -> Callable[[Any], tuple[str, Any] | None]:
    """A Moved.value that gives the same value to another key, and None for the old default."""
    return lambda given: None if given == old else (key, given)


def _patience(seconds: float) -> Callable[[Any], tuple[str, Any] | None]:
    """A Moved.value that makes an old deadline the factor cluster.patience. seconds: the deadline's default."""
    return lambda given: ("cluster.patience", round(given / seconds, 3))


BOUNDS = "is an argument of learner.loss.ratio now, in learner.loss.bounds"
MOVED = (
    *(
        Moved(f"learner.loss.{name}", BOUNDS, _same(f"learner.loss.bounds.{name}"))
        for name in ("epsilon", "delta", "cap", "band")
    ),
    Moved(
        "learner.offload_boundaries", "is a choice of learner.checkpointing now",
        lambda given: ("learner.checkpointing", "offloaded") if given else None,
    ),
    Moved("memory.base", "is a choice of memory.layout now", _same("memory.layout", "own")),
    Moved("memory.generator", "is gone: the plan divides memory.device, and rollout.kv_cache is what may be set"),
    Moved("memory.learner", "is gone: the learner has what the generators leave of memory.device"),
    Moved("guard.steps", "is gone: it is always 5"),
    *(
        Moved(
            f"cluster.deadlines.{name}", "is a part of cluster.patience now, one factor on all waits",
            _patience(seconds), settled=name == "push",
        )
        for name, seconds in Deadlines()
    ),
    Moved("env.timeout_s", "is a third of what one group may take now, by cluster.patience", _patience(300.0)),
    Moved(
        "env.start_timeout_s", "is twice env.step_timeout_s now, and at least 60 s",
        lambda given: None if given <= 60 else ("env.step_timeout_s", given / 2),
    ),
    Moved(
        "rollout.reward_memory", "is rollout.process_memory now, of environments' processes as well",
        _same("rollout.process_memory", DEFAULT_REWARD_MEMORY),
    ),
    Moved(
        "env.memory", "is rollout.process_memory now, of reward processes as well",
        lambda given: None if (size := parse_size(given)) <= DEFAULT_ENVIRONMENT_MEMORY
        else ("rollout.process_memory", max(size, DEFAULT_REWARD_MEMORY)),
    ),
)  # fmt: skip


def since_moved(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run folder has recorded, with today's keys. Where several old keys have become one, the
    largest number counts, so that no deadline or limit gets smaller."""
    found = copy.deepcopy(dict(tree))
    for moved in MOVED:
        *above, key = moved.key.split(".")
        inner = _at(found, ".".join(above))
        if not isinstance(inner, dict) or key not in inner:
            continue
        try:
            now = moved.value(inner.pop(key))
            if now is not None and now[0] == "rollout.process_memory":
                now = now[0], parse_size(now[1])
        except (TypeError, ValueError, ArithmeticError) as error:
            raise WrongInput(f"{moved.key}: {error}") from None
        if not inner:
            _at(found, ".".join(above[:-1])).pop(above[-1])
        if now is not None and not moved.settled:
            name, value = now
            there = _at(found, name)
            both = isinstance(value, int | float) and isinstance(there, int | float)
            assign(found, name, max(value, there) if both else value)
    held = _at(found, "rollout.process_memory")
    if isinstance(held, int) and _at(found, "env.use") is not None:  # it was the limit of reward processes alone
        assign(found, "rollout.process_memory", max(held, DEFAULT_ENVIRONMENT_MEMORY))
    return found


def settings_in(path: Path) -> dict[str, Any]:
    """The settings in a YAML file. A file in a run folder was recorded by that run, so its keys may be those of an
    earlier version; they are translated. Raises WrongInput."""
    tree = read_yaml(path)
    return since_moved(tree) if path.with_name(METRICS_FILE).exists() else tree


def _at(tree: Any, key: str) -> Any:
    """The value of a dotted key, or None; the whole tree for the key ""."""
    for part in filter(None, key.split(".")):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def recorded(given: object) -> RunConfig:
    """The configuration that a run folder or checkpoint has recorded, perhaps with old keys. Raises WrongInput."""
    if not isinstance(given, dict):
        raise WrongInput(f"config: must be a mapping, got {type(given).__name__}")
    return validated(since_moved(given))


# Section that a user may have given a single value -> an example of how to write its keys.
EXAMPLES = {
    "cluster.gpus": "cluster.gpus={generator: 0.5, learner: 0.5}, both roles on one card",
    "cluster.cpus": "cluster.cpus={generator: 1, learner: 1}",
    "model": "model.path=NAME",
    "data": "data.path=FILE",
    "learner.loss": "learner.loss.kind=grpo",
}
OPTIONS = ("--config", "--dry-run", "--verbose", "--assume-gpus", "--keys")  # options of `gleaner train`
MOST_LEFT_OUT = 20  # most rounds of leaving out wrong settings to check the others
INDEX = re.compile(r"\.[0-9]+(?=\.)")  # an index into a list, in a dotted key
SHOWN = 80  # most characters of a wrong value that an error shows


def load_config(path: str | None, overrides: Sequence[str], cards: int | None = None) -> RunConfig:
    """The validated configuration of a file, or of no file, with `a.b=value` overrides on top. An item of a list is
    named by its index: rewards.0.weight=2. cards: as `validated` has it.

    A file in a run folder was recorded by that run, so its keys may be those of an earlier version. Raises WrongInput.
    """
    if other := [word for word in overrides if not word.removeprefix("--").partition("=")[1]]:
        raise WrongInput(_no_setting(max(other, key=lambda word: word.startswith("-"))))
    tree = settings_in(Path(path)) if path is not None else {}
    texts = _texts()
    for override in overrides:
        key, _, text = override.removeprefix("--").partition("=")
        if not key:
            raise WrongInput(_no_setting(override))
        try:
            value = text if _is_text(text) and INDEX.sub(".<i>", key) in texts else parse_value(text)
        except WrongInput as error:
            raise WrongInput(f"{key}: {error}") from None
        assign(tree, key, value)
    return validated(tree, cards)


def _no_setting(word: str) -> str:
    key = word.lstrip("-").replace("-", "_")
    near = [f"{key}=..."] if key in {one.name for one in keys()} else []
    near += difflib.get_close_matches(word, OPTIONS, n=1, cutoff=0.7) if word.startswith("-") else []
    meant = f"--config {word}" if word.endswith((".yaml", ".yml")) else near[0] if near else ""
    hint = f"did you mean {meant}?" if meant else "for example learner.learning_rate=1e-4"
    return f"{word!r}: an override is written key=value{'; ' if meant else ', '}{hint}"


def _texts() -> set[str]:
    """The keys whose value is text or null."""
    return {key.name for key in keys() if _is_text_or_null(key.model.model_fields[key.field].annotation)}


def _is_text_or_null(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        return _is_text_or_null(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return all(map(_is_text_or_null, get_args(annotation)))
    return annotation in (str, NoneType)


def _is_text(text: str) -> bool:
    """Whether the value of a text key is taken as it stands (2024 and {question} are then text, too), and not parsed as
    YAML, as null and quoted text are."""
    text = text.strip()
    return text not in ("", "~", "null", "Null", "NULL") and not text.startswith(("'", '"'))


def validated(tree: Mapping[str, Any], cards: int | None = None) -> RunConfig:
    """The validated configuration of a tree of plain values, as YAML gives it. cards: number of cards for settings that
    say nothing of them; None: the usable ones of this machine. Raises WrongInput."""
    tree = with_cards(tree, lambda: len(usable_cards()) if cards is None else cards)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise WrongSettings("\n".join(sentences(error)), tree) from None


class WrongSettings(WrongInput):
    """Settings are wrong. tree: all settings that were given, so that the others can be checked as well."""

    def __init__(self, text: str, tree: Mapping[str, Any]) -> None:
        super().__init__(text)
        self.tree = tree

    def others(self) -> tuple[RunConfig, frozenset[str]] | None:
        """A configuration without the wrong settings, in which rules between settings are not checked, and the names of
        the sections from which nothing was left out. None if no configuration is left."""
        tree, touched = copy.deepcopy(dict(self.tree)), set[str]()
        for _ in range(MOST_LEFT_OUT):
            try:
                found = RunConfig.model_validate(tree, context={"rules": False})
            except ValidationError as error:
                places = [mistake["loc"] for mistake in error.errors()]
                if not all(places):
                    return None
                for place in sorted(places, key=len, reverse=True):
                    touched.add(str(place[0]))
                    _leave_out(tree, place)
            else:
                return found, frozenset(RunConfig.model_fields) - touched
        return None


def _leave_out(tree: Any, place: Sequence[int | str]) -> None:
    """Removes the value at `place` from the tree, if there is one; for a place inside a list, the whole list."""
    for part in place[:-1]:
        inner = tree[part] if isinstance(tree, dict) and part in tree else None
        if not isinstance(inner, dict):
            break
        tree = inner
    else:
        part = place[-1]
    if isinstance(tree, dict):
        tree.pop(part, None)


def assign(tree: Any, whole: str, value: Any) -> None:
    """Sets a dotted key in a tree of mappings and lists. Missing mappings are made. Raises WrongInput."""
    keys = whole.split(".")
    for depth, key in enumerate(keys[:-1]):
        if isinstance(tree, list):
            index = _index(tree, key, whole)
            if keys[0] == "rewards" and isinstance(tree[index], str):  # a reward may be written as its `use` alone
                tree[index] = {"use": tree[index]}
            tree = tree[index]
        elif isinstance(tree, dict):
            if tree.get(key) is None:
                tree[key] = {}
            tree = tree[key]
        if not isinstance(tree, dict | list):
            raise WrongInput(f"{whole}: {'.'.join(keys[: depth + 1])} is a {type(tree).__name__}, it has no keys")
    if isinstance(tree, list):
        tree[_index(tree, keys[-1], whole)] = value
    else:
        tree[keys[-1]] = value


def _index(items: list[Any], key: str, whole: str) -> int:
    if not key.isdecimal() or len(key) > 9 or int(key) >= len(items):
        raise WrongInput(f"{whole}: {key!r} must be an index below {len(items)} into a list")
    return int(key)


def sentences(error: ValidationError, root: type[BaseModel] = RunConfig) -> list[str]:
    """A line for each mistake: field, rule, value, next step. root: the model that was validated."""
    return [line for mistake in _whole(error.errors(), root) for line in _sentences(mistake, root)]


def _whole(mistakes: Sequence[Mapping[str, Any]], root: type[BaseModel]) -> list[Mapping[str, Any]]:
    """The mistakes, one for each value. For a key with several forms (a union), pydantic reports a mistake for each
    form; they are joined."""
    found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for number, mistake in enumerate(mistakes):
        if (place := _of_several_forms(mistake["loc"], root)) is None:
            found[(number, *mistake["loc"])] = mistake
        elif place not in found:
            found[place] = {**mistake, "loc": place}
        else:
            words = mistake["msg"].removeprefix("Input should be ")
            found[place] = {**found[place], "msg": f"{found[place]['msg']}, or {words}"}
    return list(found.values())


def _of_several_forms(location: Sequence[Any], root: type[BaseModel]) -> tuple[Any, ...] | None:
    """The part of the location down to a key that may have several forms, or None."""
    model: Any = root
    for depth, part in enumerate(location[:-1]):
        fields = getattr(model, "model_fields", {})
        if part not in fields:
            return None
        annotation = fields[part].annotation
        forms = [one for one in get_args(annotation) if one is not NoneType]
        if get_origin(annotation) in (Union, UnionType) and len(forms) > 1:
            return tuple(location[: depth + 1])
        model = next((one for one in (annotation, *forms) if _is_model(one)), None)
    return None


def _sentences(mistake: Mapping[str, Any], root: type[BaseModel]) -> list[str]:
    """The lines for one mistake. Broken rules between settings (learner.config.run) are sentences already."""
    if not mistake["loc"] and mistake["type"] == "value_error":
        return str(mistake["msg"]).removeprefix("Value error, ").splitlines()
    if mistake["type"] == "extra_forbidden" and (moved := list(_moved(mistake["loc"], mistake["input"]))):
        return moved
    return [_sentence(mistake, root)]


def _moved(location: Sequence[Any], given: Any) -> Iterator[str]:
    """A sentence for the key at this location if it has moved, or for each key in it that has."""
    where = ".".join(map(str, location))
    for moved in MOVED:
        if moved.key == where:
            yield moved.sentence(given)
        elif isinstance(given, Mapping) and moved.key.startswith(f"{where}."):
            inner = moved.key.removeprefix(f"{where}.")
            if inner in given:
                yield moved.sentence(given[inner])


def _sentence(error: Mapping[str, Any], root: type[BaseModel]) -> str:
    """One mistake as `field: rule (got value)`."""
    where = ".".join(str(part) for part in error["loc"]) or "config"
    if error["type"] == "extra_forbidden":
        return f"{where}: {_unknown(error, root)}"
    if error["type"] == "model_type":
        return f"{where}: {_group(error, root)} (got {_shown(error['input'])})"
    if error["type"] == "missing":
        return f"{where}: required, but not given"
    message = " ".join(error["msg"].removeprefix("Value error, ").split())
    if "got" in message or isinstance(error["input"], dict):  # such a message has the values already
        return f"{where}: {message}"
    return f"{where}: {message} (got {_shown(error['input'])})"


def _unknown(error: Mapping[str, Any], root: type[BaseModel]) -> str:
    """The text about an unknown key: the setting that corresponds to it, or the nearest key."""
    *above, key = map(str, error["loc"])
    if (why := NONE_HERE.get(key)) is not None:
        return f"there is no such key: {why} (got {_shown(error['input'])})"
    peft = of_peft(key)
    if peft is not None and above == ["learner", "lora"]:
        return f"unknown key; docs/trl.md says of PEFT's: {peft}"
    if (place := place_of(key)) is not None:
        return f"unknown key; docs/trl.md says of TRL's: {place}"
    if (place := of_others(key)) is not None:
        return f"unknown key; docs/trl.md has for it: {place}"
    known = _keys_at(root, error["loc"][:-1])
    near = difflib.get_close_matches(key, known, n=1)
    if not near and peft is not None:
        return f"unknown key; docs/trl.md says of PEFT's: {peft}"
    return f"unknown key; did you mean {near[0]}?" if near else f"unknown key; known here: {', '.join(known)}"


def _group(error: Mapping[str, Any], root: type[BaseModel]) -> str:
    """The text about a section that was given a single value."""
    where, known = ".".join(map(str, error["loc"])), _keys_at(root, error["loc"])
    like = EXAMPLES.get(where) or f"{where}.{known[0]}=..."
    return f"must be given key by key ({', '.join(known)}); write for example {like}"


def _shown(value: Any) -> str:
    """The value on one line of at most SHOWN characters, without secrets."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = SHOWN
    return brief.repr(masked(value))[:SHOWN]


def _keys_at(root: type[BaseModel], location: Sequence[Any]) -> list[str]:
    """The keys of the model at this location below `root`."""
    model: Any = root
    for part in location:
        if isinstance(part, int):
            continue
        model = model.model_fields[part].annotation if part in getattr(model, "model_fields", {}) else None
        model = next((a for a in (model, *get_args(model)) if isinstance(a, type) and issubclass(a, BaseModel)), None)
        if model is None:
            return []
    return sorted(model.model_fields)


class Key(NamedTuple):
    """A key of the configuration, as a user writes it."""

    name: str  # dotted; <i> stands for an index into a list
    default: str  # as it is written in a file or on the command line
    choices: str  # the words that the key takes, or ''
    model: type[BaseModel]  # the model that has the field
    field: str


def keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[Key]:
    """Every key below a model, in the order of its fields. prefix: what their names begin with."""
    for name, field in model.model_fields.items():
        inner = next((a for a in (field.annotation, *get_args(field.annotation)) if _is_model(a)), None)
        if inner is not None:
            yield from keys(inner, f"{prefix}{name}." if _is_model(field.annotation) else f"{prefix}{name}.<i>.")
            continue
        default = "required" if field.is_required() else _as_written(field.get_default(call_default_factory=True))
        choices = _choices(field.annotation) or " | ".join(field.examples or [])
        yield Key(f"{prefix}{name}", default, choices, model, name)


def describe() -> str:
    """A line for each key, with its default and choices, for --keys."""
    return "\n".join(f"  {key.name} = {key.default}" + (f"  ({key.choices})" if key.choices else "") for key in keys())


PLURAL = {int: "a number", float: "a number", str: "text", list: "a list"}


def _choices(annotation: Any) -> str:
    """`a | b` for a key that takes some words or numbers, `a | b | a number` if it takes other values too, else ''."""
    if get_origin(annotation) is Literal:
        return " | ".join(map(str, get_args(annotation)))
    if get_origin(annotation) not in (Union, UnionType):
        return ""
    plain = [get_args(member)[0] if get_origin(member) is Annotated else member for member in get_args(annotation)]
    words = [_choices(member) for member in plain if get_origin(member) is Literal]
    others = [PLURAL.get(get_origin(member) or member, "null") for member in plain if get_origin(member) is not Literal]
    return " | ".join([*words, *others]) if words else ""


def _as_written(default: Any) -> str:
    """A value as it is written in a file or on the command line."""
    return default if isinstance(default, str) else json.dumps(default)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def to_yaml(config: RunConfig) -> str:
    """The complete configuration as YAML, which load_config reads again. Values in free arguments keep their types;
    JSON would change dates and keys that are numbers."""
    return dump(config.model_dump())


# Paths and revisions of a configuration are fixed at the start. Paths become absolute, since the run's processes, and
# readers of the configuration in the run folder, have other working directories. model.revision becomes a commit, since
# a branch or tag may point to another one on another node, or when a process is started again.


def absolute(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths to the model, its adapters, the data and the files of the user's functions,
    and with the commit of model.revision. A path that does not exist stays, and the check of its setting reports it."""
    folders = ("path", "adapter", "reference", "teacher")
    model = config.model.model_copy(
        update={name: _absolute_if_there(getattr(config.model, name)) for name in folders}
        | {"revision": _commit(config.model)}
    )
    held_out = config.data.eval.model_copy(update={"path": _absolute_if_there(config.data.eval.path)})
    data = config.data.model_copy(update={"path": _absolute_if_there(config.data.path), "eval": held_out})
    if data.curriculum != OWN_ROLLOUTS:
        data = data.model_copy(update={"curriculum": _absolute_if_there(data.curriculum)})
    rewards = [
        reward.model_copy(update={"use": _function(reward.use), "args": _arguments(reward)})
        for reward in config.rewards
    ]
    loss = config.learner.loss.model_copy(update={"ratio": _function(config.learner.loss.ratio)})
    value = config.learner.value.model_copy(update={"start": _absolute_if_there(config.learner.value.start)})
    learner = config.learner.model_copy(update={"loss": loss, "value": value})
    env = config.env if config.env.use is None else config.env.model_copy(update=_environment(config.env))
    return config.model_copy(update={"model": model, "data": data, "rewards": rewards, "learner": learner, "env": env})


def _commit(model: ModelConfig) -> str | None:
    if model.revision is None:
        return None
    try:
        file = hub_file(model.source, "config.json")
    except WrongInput:
        file = None
    return (commit_of(file.parent) if file is not None else None) or model.revision


def _environment(env: EnvConfig) -> dict[str, Any]:
    """`env.use` and `env.args`, with absolute paths where they name code or files."""
    use, args = str(env.use), dict(env.args)
    for name in args.keys() & {*NAMES.get(use, ())}:
        args[name] = _code(args[name])
    for name in args.keys() & {*PATHS.get(use, ())}:
        args[name] = _absolute_if_there(args[name]) if isinstance(args[name], str) else args[name]
    return {"use": _function(use), "args": args}


def _code(given: Any) -> Any:
    """A name of code, or a list or mapping of such names, with absolute paths."""
    if isinstance(given, list | tuple):
        return [_code(one) for one in given]
    if isinstance(given, dict):
        return {key: _code(one) for key, one in given.items()}
    return _function(given) if isinstance(given, str) else given


def _function(use: str) -> str:
    """`file.py:function`, a pickled function's file, or `adapter:folder` with an absolute path; other names stay."""
    if use.startswith(ADAPTER):
        return f"{ADAPTER}{_absolute_if_there(use.removeprefix(ADAPTER))}"
    file, colon, function = use.rpartition(":")
    return f"{_absolute_if_there(file)}{colon}{function}" if file.endswith((".py", SUFFIX)) else use


def _arguments(reward: RewardConfig) -> dict[str, Any]:
    """The arguments of a reward, with the absolute path of the model that a built-in function reads."""
    if classifier_of(reward) is None:
        return reward.args
    return {**reward.args, "model": _absolute_if_there(classifier_of(reward))}


def _absolute_if_there(text: str | None) -> str | None:
    try:
        path = Path(text).expanduser() if text is not None else None
        if path is None or not path.exists():
            return text
        return str(path.resolve() if ".." in path.parts else path.absolute())
    except (OSError, RuntimeError):  # the text cannot be a path
        return text
