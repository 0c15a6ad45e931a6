"""The reward functions that come with the tasks of reasoning_gym."""

import ast
import builtins
import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any, NamedTuple

from cluster import child
from cluster.confinement import confine
from rewards import limits
from rewards.base import Zeroed, check_tag, said, tagged, text_of
from rewards.limits import Late, Patience

# Tasks of reasoning_gym, each imported with its own family (arithmetic, logic, games ...) instead of with all of them.
#
# The package imports every family, with matplotlib and sympy: 1 s of a core in each of the three processes of a start
# that need one task. The family of arithmetic takes a tenth of that.


PACKAGE = "reasoning_gym"
_whole = RLock()


def task_factory(task: str | None = None) -> ModuleType:
    """reasoning_gym.factory, in which the task is registered if the package has it. Raises ImportError."""
    package = _package()
    import_module(f"{PACKAGE}.coaching")  # first, as in the package: it and the factory import each other
    found = import_module(f"{PACKAGE}.factory")
    if task is None:
        return found
    family = _family(package, task)
    if family is not None:
        import_module(f"{PACKAGE}.{family}")
    if family is None or task not in found.DATASETS:
        _ = package.create_dataset  # with every family
    return found


def _package() -> ModuleType:
    """The package. If nobody has imported it yet: without its content, which comes with the first attribute that is
    asked for, so that other code of the process finds all of it."""
    if PACKAGE in sys.modules:
        return sys.modules[PACKAGE]
    spec = find_spec(PACKAGE)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
    package, loader = module_from_spec(spec), spec.loader

    def fill(name: str) -> Any:
        with _whole:
            if vars(package).pop("__getattr__", None) is not None:
                loader.exec_module(package)
        return getattr(package, name)

    vars(package)["__getattr__"] = fill
    return sys.modules.setdefault(PACKAGE, package)


def _family(package: ModuleType, task: str) -> str | None:
    """The folder with a file of that name, which is how the package names nearly all of its tasks; else None."""
    if not task.isidentifier():
        return None
    files = {file.relative_to(home) for home in package.__path__ for file in Path(home).rglob(f"{task}.py")}
    folders = {file.parts[0] for file in files if len(file.parts) > 1}
    return folders.pop() if len(folders) == 1 else None


# Scores of what a policy wrote where the scorer evaluates it, each in a forked child that confines itself.
#
# A fork costs milliseconds, where a fresh interpreter (rewards.code.process) would import sympy for each answer. What
# is evaluated shares the interpreter of the scorer, so the reward functions below let no code through:
# the walls of cluster.confinement are the second line, and `gleaner doctor` says which of them stand on this kernel.

SECONDS = 2  # of wall time, and of CPU time, that one call may take
PARALLEL = 4  # calls at once: more would share the cores, and an answer that takes its time would be late
_MEMORY = 256 << 20  # bytes that a call may write to, beside what this process holds
_LONGEST = 500  # characters of an error
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.", "shutil.", "ctypes.", "signal.", "tempfile.")  # audit events, by their beginning
_READS = ("os.listdir", "os.scandir", "os.walk")  # but these, of which imports are made


class Scored(NamedTuple):
    """The score of a call: 0 where it has none, since it raised an exception (in words), or (`why`) since it was late,
    ended its process, or refused."""

    score: float
    raised: str = ""
    why: str = ""


def forked_scores(calls: Sequence[Callable[[], float | Scored]]) -> list[Scored]:
    """What becomes of each call, which may say so itself.

    To be called where no other thread holds a lock that a call needs. Raises OSError if no process can be started.
    """
    walls = functools.partial(_walls, limits.memory_held() + _MEMORY)
    found: list[Scored] = []
    for start in range(0, len(calls), PARALLEL):
        together = [functools.partial(_scored, call) for call in calls[start : start + PARALLEL]]
        found += map(_read, child.forked(together, SECONDS, walls))
    return found


def _walls(most: int) -> None:
    child.silence()  # what is evaluated must not write to the log
    confine(SECONDS, most, 0, writes=False)
    sys.addaudithook(_refuse)


def _scored(call: Callable[[], float | Scored]) -> Scored:
    try:
        found = call()
        return found if isinstance(found, Scored) else Scored(float(found))
    except Exception as error:
        return Scored(0.0, f"{type(error).__name__}: {said(error)}"[:_LONGEST])


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and arguments[2] & _WRITES:
        raise PermissionError("an answer may write no files here")
    if event.startswith(_CHANGES) and event not in _READS:
        raise PermissionError(f"an answer may not do this here: {event}")


def _read(told: child.Outcome) -> Scored:
    if told.late:
        return Scored(0.0, why=f"not evaluated within {SECONDS} s")
    try:
        score, raised, why = told.answer
        if isinstance(score, float):
            return Scored(score, str(raised), str(why))
    except (ValueError, TypeError):
        pass
    return Scored(0.0, why="its process ended without a score")


task_factory()  # with this module, which only the loader imports: what is missing is said as it loads

# Whose scorers evaluate text as Python, the answer's or the row's: by eval, or by sympy's parse_expr, which calls it.
EVALUATED = frozenset(
    (
        "binary_matrix", "bitwise_arithmetic", "countdown", "intermediate_integration", "n_queens", "number_sorting",
        "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix", "string_insertion",
    )
)  # fmt: skip
# Whose scorers compare grids with tuples, which are lists in JSON.
_GRIDS = frozenset({"arc_agi", "rearc"})
# Whose scorers find a number that is none at no distance from the right one.
_DISTANCES = frozenset({"complex_arithmetic"})
_NO_NUMBER = re.compile("nan|inf", re.IGNORECASE)


Scorer = Callable[..., float]
_SECONDS = 2.0  # for an answer that is not evaluated
_FORMULA = (
    ast.Expression, ast.Constant, ast.Name, ast.expr_context, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop,
    ast.List, ast.Tuple, ast.Set, ast.Call,
)  # fmt: skip
_BUILT_INS = frozenset(vars(builtins))
_OF_NUMBERS = frozenset(("abs", "complex", "divmod", "float", "int", "max", "min", "pow", "round", "sum"))


@functools.cache
def _scorer(task: str) -> Scorer:
    factory = task_factory(task)
    scorer: Scorer = factory.get_score_answer_fn(task)  # builds a data set, so once per task
    if task in EVALUATED:  # its own problem, for what it imports and caches, which each child would do anew
        own = _own_problem(scorer)
        scorer(answer=own["answer"], entry=own)
    return scorer


def _own_problem(scorer: Scorer) -> Mapping[str, Any]:
    data_set: Any = getattr(scorer, "__self__")  # noqa: B009
    problem: Mapping[str, Any] = data_set[0]
    return problem


def reasoning_gym(
    completions: Sequence[Any],
    answer: Sequence[str],
    metadata: Sequence[str | Mapping[str, Any]],
    *,
    strict: bool = True,
    tag: str = "answer",
) -> list[float]:
    """The task's own score, 0..1, of what stands in the last `<tag>...</tag>`; 0.0 if there is no such tag, or if the
    scorer raises an exception of it.

    Needs the columns `answer` and `metadata` (a mapping, or JSON text of one, with `source_dataset`) as reasoning_gym
    makes them. strict: only a full score counts, since some tasks give partial credit to junk.
    What tasks evaluate as Python must be a formula or a literal, and is evaluated in a confined process, for at most
    two seconds; code scores 0.0.
    Raises ValueError if metadata names no task that reasoning_gym knows, and what the scorer raises of a wrong row.
    """
    check_tag(tag)
    scores = [0.0] * len(completions)
    why: dict[int, str] = {}
    patience = Patience(_SECONDS)
    evaluated: dict[int, tuple[Scorer, str, Mapping[str, Any]]] = {}
    for i, (completion, gold, meta) in enumerate(zip(completions, answer, metadata, strict=True)):
        facts = _facts(meta)
        task = facts["source_dataset"]
        scorer = _scorer(task)
        said = tagged(text_of(completion), tag)
        if said is None or (task in _DISTANCES and _NO_NUMBER.search(said)):
            continue
        entry = {"answer": gold, "metadata": facts}
        if task in EVALUATED:
            evaluated[i] = scorer, said, entry
            continue
        try:
            with patience.with_one():
                scores[i] = _direct(scorer, said, entry)
        except Late:
            why[i] = "not scored in time"
    for i, (score, _, reason) in zip(evaluated, _confined(list(evaluated.values())), strict=True):
        scores[i] = score if math.isfinite(score) else 0.0
        if reason:
            why[i] = reason
    return Zeroed([float(score >= 1.0) if strict else score for score in scores], why)


def _facts(meta: str | Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(meta) if isinstance(meta, str) else dict(meta)
    if "source_dataset" not in facts:
        raise ValueError(f"column 'metadata': needs the key source_dataset, has {sorted(facts)}")
    if facts["source_dataset"] in _GRIDS:
        for name in ("input", "output"):
            if name in facts:
                facts[name] = tuple(map(tuple, facts[name]))
    return facts


def _direct(scorer: Scorer, said: str, entry: Mapping[str, Any]) -> float:
    try:
        score = float(scorer(answer=said, entry=entry))
    except Exception:
        _check_row(scorer, entry)
        return 0.0
    return score if math.isfinite(score) else 0.0


def _check_row(scorer: Scorer, entry: Mapping[str, Any]) -> None:
    """Raises what the scorer raises of the gold answer, too: then the row is wrong, and not the answer."""
    _check_complete(scorer, entry)
    if entry["answer"] is not None:
        scorer(answer=entry["answer"], entry=entry)


def _check_complete(scorer: Scorer, entry: Mapping[str, Any]) -> None:
    """Raises ValueError if there is no gold answer, unless the task has none and the facts that it has in its place."""
    if entry["answer"] is not None:
        return
    own = _own_problem(scorer)
    if own["answer"] is not None:
        raise ValueError("column 'answer': must have the gold answer, got None; leave such rows out")
    if missing := sorted(set(own["metadata"]) - set(entry["metadata"])):
        raise ValueError(f"column 'metadata': lacks {', '.join(missing)}")


def _confined(answers: Sequence[tuple[Scorer, str, Mapping[str, Any]]]) -> list[Scored]:
    """The gold answer is tried in a process of its own: that of the answer may have no memory left."""
    found = forked_scores([functools.partial(_evaluated, *answer) for answer in answers])
    raised = [answer for answer, scored in zip(answers, found, strict=True) if scored.raised]
    for scorer, _, entry in raised:
        _check_complete(scorer, entry)
    golds = [functools.partial(scorer, answer=entry["answer"], entry=entry) for scorer, _, entry in raised]
    for scored in forked_scores(golds):
        if scored.raised:
            raise ValueError(scored.raised)
    return found


def _evaluated(scorer: Scorer, said: str, entry: Mapping[str, Any]) -> float | Scored:
    if said != entry["answer"] and is_code(said):
        return Scored(0.0, why="the answer is code, and no formula or literal")
    return scorer(answer=said, entry=entry)


def is_code(text: str) -> bool:
    """Whether Python, or sympy, which reads 3! as well, would do more with a text than compute a formula of names and
    numbers, or read a literal. What does not parse is neither: nothing will evaluate it."""
    try:
        tree = ast.parse(text.strip().replace("!", ""), mode="eval")
    except (SyntaxError, ValueError):
        return False
    except (RecursionError, MemoryError):
        return True
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    texts = any(isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) for node in nodes)
    called = [node for node in nodes if isinstance(node, ast.Call)]
    return (
        not all(isinstance(node, _FORMULA) for node in nodes)
        or any("__" in name or (name in _BUILT_INS and name not in _OF_NUMBERS) for name in names)
        or any(not isinstance(node.func, ast.Name) or node.keywords for node in called)
        or (texts and bool(names))
    )
