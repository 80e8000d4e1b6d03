"""Mutation tests of the files that decide what is recommended: which changes of their code no test notices.

A mutant is a file with one operator, constant, condition or returned value changed. Its tests run in a fork
of a pytest that has collected them, where its code replaces the file's in memory; nothing is written. It is
killed where a test fails or does not end, and survives otherwise. Texts, asserts, annotations and decorators
are left alone.

    python -m benchmarks.tuner.mutation [FILE…] [--limit N] [--seed N] [--json FILE] [--again FILE]
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from benchmarks.tuner.equivalent_mutants import EQUIVALENT

STUDY, SEARCH = "tests/tuner/study/test_", "tests/tuner/search/test_"
TESTS: dict[str, tuple[str, ...]] = {
    "tuner/study/confirmation.py": (f"{STUDY}confirmation.py",),
    "tuner/study/candidate_confirmation.py": (f"{STUDY}candidate_confirmation.py",),
    "tuner/study/outcome.py": (f"{STUDY}outcome.py", f"{SEARCH}repeats.py", f"{STUDY}optimize.py"),
    "tuner/study/final_trials.py": (f"{SEARCH}repeats.py", f"{STUDY}optimize.py"),
    "tuner/study/first_trials.py": (f"{STUDY}optimize.py",),
    "tuner/study/criteria.py": (f"{STUDY}criteria.py",),
    "tuner/study/budget.py": (f"{STUDY}budget.py",),
    "tuner/search/strategy.py": tuple(f"{SEARCH}{t}.py" for t in ("strategy", "repeats")),
    "tuner/search/crashes.py": (f"{SEARCH}crashes.py", f"{SEARCH}inactive_knobs.py"),
    "tuner/search/inactive_knobs.py": (f"{SEARCH}inactive_knobs.py",),
    "tuner/search/repeats.py": (f"{SEARCH}repeats.py",),
    "tuner/runs/rungs.py": ("tests/tuner/runs/test_rungs.py",),
    "loadgen/measure/estimator.py": tuple(
        f"tests/loadgen/{t}.py"
        for t in ("measure/test_estimator", "test_compare", "foreign/test_stated_comparison")
    ),
}
"""The tests of each file, the mirrored ones first."""
SHORT = (ast.BinOp, ast.Compare, ast.Call, ast.Assign, ast.AnnAssign, ast.Subscript, ast.keyword, ast.Return)
"""Around a constant or a name, these are shown whole."""
VALUES = (bool, int, float, str, tuple, dict)
"""Types of the constants that mutants change."""
LEAST_SECONDS, TIMES_UNMUTATED = 20, 5
"""Tests of a mutant may take so many times what those of the file itself take, and so long in any case."""

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
FALSY = {"bool": "not ({})", "int": "-({})", "float": "-({})", "str": "''"}
"""By the annotated type of what a function returns: what it returns instead."""


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    function: str
    before: str
    after: str

    @property
    def key(self) -> str:
        """The same wherever the line moves."""
        return f"{self.function}: {self.before} → {self.after}"


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in place of an expression or of an assignment with an operator."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[op]):
            for other in COMPARISONS[type(op)]:
                yield ast.Compare(changed.left, [other()], changed.comparators)
        case ast.BoolOp(op=op):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), changed.values)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(value=float(value)):
            yield from (ast.Constant(2 * value), ast.Constant(value / 2)) if value else (ast.Constant(1.0),)
        case ast.Name(id=name) if name in NAMES:
            yield ast.Name(NAMES[name], ast.Load())
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            changed.op = ARITHMETIC[type(op)]()
            yield changed
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield changed.operand


def conditions(node: ast.AST) -> Iterator[tuple[ast.AST | list[ast.expr], str | int, bool]]:
    """Where conditions stand in a node, and what they may be replaced by."""
    match node:
        case ast.If() | ast.IfExp():
            yield from ((node, "test", True), (node, "test", False))
        case ast.While():
            yield node, "test", False
        case ast.comprehension(ifs=ifs):
            yield from ((ifs, index, value) for index in range(len(ifs)) for value in (True, False))


def returned(function: ast.FunctionDef) -> Iterator[tuple[ast.Return, ast.expr]]:
    kind = ast.unparse(function.returns) if function.returns else ""
    template = "None" if kind.endswith("| None") else FALSY.get(kind)
    for node in ast.walk(function):
        if template and isinstance(node, ast.Return) and node.value:
            yield node, ast.parse(template.format(ast.unparse(node.value)), mode="eval").body


def mutants(file: str, tree: ast.Module) -> Iterator[tuple[Mutant, CodeType]]:
    """Each mutant of a file with its code, one change at a time in ``tree`` itself."""

    def one(
        holder: Any, slot: Any, new: ast.AST, function: str, shown: ast.AST | None = None
    ) -> Iterator[tuple[Mutant, CodeType]]:
        old = holder[slot] if isinstance(holder, list) else getattr(holder, slot)
        before = ast.unparse(shown or old)
        place(holder, slot, ast.fix_missing_locations(ast.copy_location(new, old)))
        code, after = compile(tree, file, "exec"), ast.unparse(shown or new)
        place(holder, slot, old)
        if before != after:
            yield Mutant(file, old.lineno, function, before, after), code

    def within(node: ast.AST, function: str) -> Iterator[tuple[Mutant, CodeType]]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}" if function else node.name
        if isinstance(node, ast.FunctionDef):
            for statement, value in returned(node):
                yield from one(statement, "value", value, function)
        for condition, slot, truth in conditions(node):
            yield from one(condition, slot, ast.Constant(truth), function)
        for name, field in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            slots = enumerate(field) if isinstance(field, list) else [(name, field)]
            for slot, child in slots:
                if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr | ast.Assert):
                    alone = not isinstance(child, ast.Constant | ast.Name) or not isinstance(node, SHORT)
                    for new in replacements(child):
                        holder = field if isinstance(field, list) else node
                        yield from one(holder, slot, new, function, None if alone else node)
                    yield from within(child, function)

    yield from within(tree, "")


def place(holder: Any, slot: Any, node: ast.AST) -> None:
    if isinstance(holder, list):
        holder[slot] = node
    else:
        setattr(holder, slot, node)


def install(module: ModuleType, code: CodeType) -> None:
    """Give what ``module`` defines the code, defaults and values of the mutant, wherever it was imported."""
    namespace: dict[str, object] = {"__name__": module.__name__, "__file__": module.__file__}
    exec(code, namespace)
    for name, new in namespace.items():
        old = vars(module).get(name)
        if isinstance(old, VALUES) and old != new:
            for importer in [m for m in sys.modules.values() if vars(m).get(name) is old]:
                setattr(importer, name, new)
        elif getattr(old, "__module__", None) == module.__name__:
            rewrite(old, new)


def rewrite(old: Any, new: Any) -> None:
    """Turn a function, or a class with all that it has, into its mutant in place."""
    if isinstance(old, type):
        for name, member in list(vars(new).items()):
            if not name.startswith("__") and isinstance(member, VALUES):
                setattr(old, name, member)
            elif name in vars(old) and name != "__class__":
                rewrite(vars(old)[name], member)
    for inner in ("fget", "__func__", "func"):
        if hasattr(old, inner) and not isinstance(old, FunctionType):
            rewrite(getattr(old, inner), getattr(new, inner))
    if isinstance(old, FunctionType):
        old.__code__, old.__defaults__, old.__kwdefaults__ = (
            new.__code__,
            new.__defaults__,
            new.__kwdefaults__,
        )


class Trials:
    """A pytest plugin: runs what was collected for the file's own code, then for each mutant, in forks."""

    def __init__(self, file: str, chosen: Sequence[tuple[Mutant, CodeType]]) -> None:
        self.file, self.chosen = file, chosen
        self.module = file.removesuffix(".py").replace("/", ".")
        self.survivors: list[Mutant] = []
        self.sound = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """None goes on with pytest's own loop, which is what a fork does. The file's own code is installed
        first as a mutant's is, so that tests which fail for the installing are no kills.
        """
        module = import_module(self.module)
        own = compile(Path(self.file).read_text(), self.file, "exec")
        begun = time.monotonic()
        for number, (mutant, code) in enumerate(((None, own), *self.chosen)):
            child = os.fork()
            if child == 0:
                install(module, code)
                return None
            if number == 0:
                self.sound = passed(child, 600)
                seconds = max(LEAST_SECONDS, TIMES_UNMUTATED * (time.monotonic() - begun))
                if not self.sound:
                    break
            elif passed(child, seconds) and mutant:
                self.survivors.append(mutant)
        return True


def passed(child: int, seconds: float) -> bool:
    """Whether the tests in a fork pass; those that take longer than ``seconds`` are ended, and did not."""
    end = time.monotonic() + seconds
    while not (done := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.01)
    return done[1] == 0


def survey(file: str, limit: int | None, seed: int, again: set[str] | None) -> dict[str, Any]:
    """Try the mutants of a file."""
    made = list(mutants(file, ast.parse(Path(file).read_text())))
    equivalent = [m for m, _ in made if m.key in EQUIVALENT.get(file, {})]
    chosen = [(m, code) for m, code in made if m not in equivalent and (again is None or m.key in again)]
    if limit is not None and limit < len(chosen):
        chosen = random.Random(seed).sample(chosen, limit)
    trials, parent = Trials(file, chosen), os.getpid()
    output = os.dup(1), os.dup(2)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    status: int = 1
    try:
        status = pytest.main(
            ["-x", "-p", "no:cacheprovider", "-o", "addopts=", *TESTS[file]], plugins=[trials]
        )
    finally:
        if os.getpid() != parent:
            os._exit(status)
    for saved, number in zip(output, (1, 2), strict=True):
        os.dup2(saved, number)
    if not trials.sound:
        sys.exit(f"the tests of {file} fail without a mutation: {' '.join(TESTS[file])}")
    return {
        "killed": len(chosen) - len(trials.survivors),
        "tried": len(chosen),
        "equivalent": len(equivalent),
        "mutants": len(made),
        "survivors": [{**asdict(mutant), "key": mutant.key} for mutant in trials.survivors],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="default: all that decide")
    parser.add_argument("--limit", type=int, help="mutants of each file, drawn by --seed; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where the results are written")
    parser.add_argument("--again", type=Path, help="only what survived in this file of --json")
    options = parser.parse_args()
    if unknown := [file for file in options.files if file not in TESTS]:
        parser.error(f"{', '.join(unknown)}: no tests are named for it; known: {', '.join(TESTS)}")
    os.nice(10)
    before = json.loads(options.again.read_text()) if options.again else {}
    found = {}
    for file in options.files or TESTS:
        again = {m["key"] for m in before.get(file, {}).get("survivors", ())} if options.again else None
        result = found[file] = survey(file, options.limit, options.seed, again)
        for mutant in result["survivors"]:
            print(f"  {file}:{mutant['line']}  {mutant['key']}")
        killed, tried = result["killed"], result["tried"]
        print(
            f"{file}: {killed} of {tried} killed ({killed / max(1, tried):.0%}), {result['equivalent']} "
            f"equivalent, {result['mutants']} mutants in all",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
