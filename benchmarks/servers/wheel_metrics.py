"""The metrics that a released server exposes and the lines that it logs now and then, read off its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.servers.sources import Sources, keywords, local_names

Metric = dict[str, Any]
"""``type``, ``labels``, ``buckets`` where they are constants, ``when``: the conditions that it is made
under, as they stand in the source."""
TYPES = ("gauge", "counter", "histogram", "summary")


def read_metrics(sources: Sources, prefix: str) -> dict[str, Metric]:
    """By name, without the suffixes that a client library adds. ``prefix``: e.g. ``vllm:``.

    Where two engines are in one wheel, as vLLM's V0 and V1 were, the newer one's counts.
    """
    found: dict[str, Metric] = {}
    both = any("/v1/metrics/" in path for path in sources.trees)
    for path, tree in sorted(sources.trees.items(), key=lambda item: "/v1/" not in item[0]):
        older = ("V0",) if both and path.endswith("/engine/metrics.py") else ()
        for name, metric, conditions in _made(sources, tree, prefix):
            if name not in found:
                when = [*older, *conditions]
                found[name] = {**metric, "when": when} if when else metric
    return dict(sorted(found.items()))


def _made(sources: Sources, tree: ast.AST, prefix: str) -> Iterator[tuple[str, Metric, tuple[str, ...]]]:
    for call, conditions, local in _calls(tree):
        given, made = keywords(call), ast.unparse(call.func).lower()
        kind = next((kind for kind in TYPES if kind in made), None)
        stated = given["name"] if "name" in given else call.args[0] if call.args else None
        if kind is None or stated is None:
            continue
        name = sources.value(stated, local)
        names = [name] if isinstance(name, str) else _looped(stated, local)
        metric: Metric = {"type": kind}
        labels = sources.value(given.get("labelnames"), local)
        if isinstance(labels, list) and all(isinstance(label, str) for label in labels):
            metric["labels"] = labels
        buckets = _buckets(sources, given.get("buckets"), local)
        if isinstance(buckets, list) and all(isinstance(bound, int | float) for bound in buckets):
            metric["buckets"] = buckets
        for each in names:
            if each.startswith(prefix) and re.fullmatch(r"[\w:]+", each):
                bare = each.removesuffix("_total") if kind == "counter" else each
                yield bare, metric, conditions


def _looped(stated: ast.expr, local: Mapping[str, ast.expr]) -> list[str]:
    """Names that a loop goes through, where one call makes several metrics: all words of its function's
    tables."""
    if not isinstance(stated, ast.Name):
        return []
    tables = (v for v in local.values() if isinstance(v, ast.List | ast.Tuple | ast.Dict))
    words = (node for table in tables for node in ast.walk(table))
    return [w.value for w in words if isinstance(w, ast.Constant) and isinstance(w.value, str)]


def _buckets(sources: Sources, stated: ast.expr | None, local: Mapping[str, ast.expr]) -> Any:
    """Constants, or vLLM's ``histogram_buckets("request_latency", …)`` for REQUEST_LATENCY_BUCKETS."""
    if isinstance(stated, ast.Name) and stated.id in local:
        stated = local[stated.id]
    match stated:
        case ast.Call(args=[ast.Constant(value=str(family)), *_]):
            return sources.value(sources.names.get(f"{family.upper()}_BUCKETS"))
    return sources.value(stated, local)


def read_log_formats(sources: Sources) -> list[str]:
    """The format strings of the lines on throughput, in the order of the source."""
    found: dict[str, None] = {}
    for path, tree in sources.trees.items():
        if not re.search(r"metrics|loggers|metrics_reporter|scheduler_metrics_mixin", path):
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                texts = [
                    node.value
                    for node in ast.walk(function)
                    if isinstance(node, ast.Constant) and isinstance(node.value, str)
                ]
                if any("throughput" in text and re.search(r"%\.?\d*[dfs]|: $|\{", text) for text in texts):
                    found |= dict.fromkeys(t for t in texts if re.search(r"%[.\d]*[dfs]|: $", t))
    return list(found)


def _calls(
    tree: ast.AST,
) -> Iterator[tuple[ast.Call, tuple[str, ...], Mapping[str, ast.expr]]]:
    """Every call, with the conditions that it stands under and the names of its function."""

    def walk(
        node: ast.AST, conditions: tuple[str, ...], local: Mapping[str, ast.expr]
    ) -> Iterator[tuple[ast.Call, tuple[str, ...], Mapping[str, ast.expr]]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = {**local, **local_names(node)} if not isinstance(node, ast.ClassDef) else local
            for child in node.body:
                yield from walk(child, () if isinstance(node, ast.ClassDef) else conditions, names)
            return
        if isinstance(node, ast.If):
            yield from walk(node.test, conditions, local)
            test = ast.unparse(node.test)
            for child in node.body:
                yield from walk(child, (*conditions, test), local)
            for child in node.orelse:
                yield from walk(child, (*conditions, f"not ({test})"), local)
            return
        if isinstance(node, ast.Call):
            yield node, conditions, local
        for part in ast.iter_child_nodes(node):
            yield from walk(part, conditions, local)

    yield from walk(tree, (), {})
