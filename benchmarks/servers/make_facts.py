"""``make facts``: read the flags, metrics and periodic log lines of released servers off their wheels into
``servers/facts.json``, and say what that changes, and what of metrics, knobs and playbooks the newest breaks.

    python -m benchmarks.servers.make_facts [--without KIND=VERSION] [--wheel KIND=VERSION=FILE]

The wheels are fetched by name from the package index, a few files of each; nothing of them is run.
``--without`` leaves a release out, ``--wheel`` adds one from this machine.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.servers.breakage import broken
from benchmarks.servers.sources import Sources
from benchmarks.servers.wheel_flags import read_flags
from benchmarks.servers.wheel_metrics import read_log_formats, read_metrics
from benchmarks.servers.wheels import TIMEOUT_SECONDS, Wheel, fetch, read, releases
from servers.facts import FILE, Releases, version_of
from servers.files import write_atomically
from servers.kinds import KINDS


@dataclass(frozen=True)
class Package:
    """``wanted``: the members that are read. ``registers``: those of them that register flags."""

    kind: str
    prefix: str
    first: tuple[int, ...]
    wanted: re.Pattern[str]
    registers: re.Pattern[str]
    fields: tuple[str, ...]
    """Dataclasses of which every field is a flag; further ones stand in files that match ``field_files``."""
    field_files: re.Pattern[str] | None = None


PACKAGES = (
    Package(
        "vllm",
        "vllm:",
        (0, 6),
        re.compile(
            r"vllm/(engine/(arg_utils|metrics)|config(/\w+)?|entrypoints/(\w+/)*cli_args"
            r"|entrypoints/cli/serve|v1/metrics/\w+|v1/spec_decode/metrics"
            r"|distributed/kv_transfer/(\w+/)*\w*metrics\w*)\.py"
        ),
        re.compile(r"vllm/(engine/arg_utils|entrypoints/(\w+/)*cli_args|entrypoints/cli/serve)\.py"),
        ("FrontendArgs",),
    ),
    Package(
        "sglang",
        "sglang:",
        (0, 4),
        re.compile(
            r"sglang/srt/(server_args|arg_groups/(\w+/)*\w+|metrics/\w+|observability/\w*metrics\w*"
            r"|managers/(\w+/)*\w*metrics\w*|managers/scheduler)\.py"
        ),
        re.compile(r"sglang/srt/server_args\.py"),
        ("ServerArgs",),
        re.compile(r"sglang/srt/arg_groups/fields/\w+\.py"),
    ),
)


def facts_of(package: Package, wheel: Wheel) -> dict[str, Any]:
    """Of one release: flags and metrics by name, and log formats."""
    sources = Sources.of(wheel.files)
    further = (
        node.name
        for path, tree in sources.trees.items()
        if package.field_files and package.field_files.fullmatch(path)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    )
    fields = (*package.fields, *further)
    return {
        "flags": read_flags(sources, package.registers, fields),
        "metrics": read_metrics(sources, package.prefix),
        "logs": {text: {} for text in read_log_formats(sources)},
    }


def in_spans(told: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Facts by release, oldest first, as one table: name -> [first, last or null, fact], a row for each time
    that the fact changed. ``last`` null: the newest release has it."""
    versions = list(told)
    found: dict[str, Any] = {"releases": versions}
    for section in ("flags", "metrics", "logs"):
        table: dict[str, list[list[Any]]] = {}
        for version in versions:
            for name, fact in told[version][section].items():
                rows = table.setdefault(name, [])
                if rows and rows[-1][2] == fact and rows[-1][1] == _before(version, versions):
                    rows[-1][1] = version
                else:
                    rows.append([version, version, fact])
        for rows in table.values():
            if rows[-1][1] == versions[-1]:
                rows[-1][1] = None
        found[section] = dict(sorted(table.items()))
    return found


def _before(version: str, versions: list[str]) -> str | None:
    place = versions.index(version)
    return versions[place - 1] if place else None


def chosen(urls: Mapping[str, str], first: tuple[int, ...]) -> dict[str, str]:
    """The releases from ``first`` on; of those that were published again the first."""
    return {v: url for v, url in urls.items() if version_of(v)[:2] >= first and re.fullmatch(r"[\d.]+", v)}


def render(facts: Mapping[str, Any]) -> str:
    """One line per name, so that a diff shows what a release changed."""
    parts = []
    for kind, tables in facts.items():
        lines = [f'  "releases": {json.dumps(tables["releases"])}']
        for section in ("flags", "metrics", "logs"):
            rows = ",\n".join(
                f"    {json.dumps(name)}: {json.dumps(spans)}" for name, spans in tables[section].items()
            )
            lines.append(f'  "{section}": {{\n{rows}\n  }}')
        parts.append(f'"{kind}": {{\n' + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def gather(without: Iterable[str], local: Iterable[str]) -> dict[str, Any]:
    """Raises httpx.HTTPError where the index cannot be reached."""
    left_out, own = set(without), [item.split("=", 2) for item in local]
    facts = {}
    with httpx.Client(timeout=TIMEOUT_SECONDS, follow_redirects=True) as client:
        for package in PACKAGES:
            urls = chosen(releases(client, package.kind), package.first)
            told = {}
            for version, url in urls.items():
                if f"{package.kind}={version}" not in left_out:
                    print(f"{package.kind} {version}", file=sys.stderr, flush=True)
                    told[version] = facts_of(package, fetch(client, version, url, package.wanted))
            for kind, version, path in own:
                if kind == package.kind:
                    told[version] = facts_of(package, read(version, path, package.wanted))
            facts[package.kind] = in_spans(dict(sorted(told.items(), key=lambda item: version_of(item[0]))))
    return facts


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--without", action="append", default=[], metavar="KIND=VERSION")
    ask.add_argument("--wheel", action="append", default=[], metavar="KIND=VERSION=FILE")
    ask.add_argument("--out", type=Path, default=FILE)
    given = ask.parse_args()
    before = given.out.read_text() if given.out.exists() else ""
    facts = gather(given.without, given.wheel)
    text = render(facts)
    write_atomically(given.out, [text])
    print(
        "".join(unified_diff(before.splitlines(True), text.splitlines(True), "before", "after", n=0)), end=""
    )
    for name, known in msgspec.convert(facts, dict[str, Releases]).items():
        older, newer = known.releases[-2:]
        print(f"{name} {newer} breaks, of what {older} had:")
        print("\n".join(f"  {line}" for line in broken(KINDS[name], known, older, newer)) or "  nothing")


if __name__ == "__main__":
    main()
