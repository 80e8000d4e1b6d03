"""Every flag that a knob or a playbook writes exists in each release that it may be written for."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from doctor.diagnosis.playbook import load_all
from loadgen.targets.server import ServerTarget
from servers.command import parse_command
from servers.facts import releases_of
from servers.flags.offered_flags import OfferedFlags
from servers.flags.words import parse_flags, vocabulary
from servers.kind import ServerKind
from servers.kinds import KINDS, SGLANG, VLLM
from servers.known_flags import resolve
from tuner.space.knobs import SPECULATION, Surroundings, knobs_of

RELEASES = [
    pytest.param(kind, version, id=f"{name}-{version}")
    for name, kind in KINDS.items()
    if (known := releases_of(name))
    for version in known.releases
]


def lacking(kind: ServerKind, flags: Mapping[str, Any], offered: OfferedFlags) -> list[str]:
    """What of a rendered config the release does not take."""
    words = [word.partition("=")[0] for word in kind.spelling.render(flags, offered)]
    names = [word[2:].replace("-", "_") for word in words if word.startswith("--")]
    unknown = [name for name in names if name.removeprefix("no_") not in offered]
    own = kind.spelling.to_own(flags, offered)
    return unknown + [f"{name}={value}" for name, value in own.items() if not offered.takes(name, value)]


def of_knobs(kind: ServerKind, offered: OfferedFlags) -> Iterator[dict[str, Any]]:
    """A config for each value of each knob that a search has with this release."""
    around = Surroundings(kind.name, offered=offered)
    for knob in knobs_of(kind.name):
        if around.absent(knob, {}):
            continue
        if knob.flag == SPECULATION:
            yield {SPECULATION: {"method": "ngram", "num_speculative_tokens": 2}}
        else:
            yield from ({knob.flag: value} for value in around.narrowed(knob).values or (64,))


def of_playbooks(kind: ServerKind, version: str) -> Iterator[dict[str, Any]]:
    """A config for each flag that a remedy sets where the release has it."""
    flags = resolve({}, None, None, kind=kind, version=version)
    for book in load_all():
        for remedy in book.remedies:
            for name, setting in remedy.settings.items():
                value = setting if isinstance(setting, str) else 1
                if name != "num_speculative_tokens" and not flags.unavailable(name, value):
                    yield {name: value}
            for name in remedy.unset:
                if not flags.unavailable(name):
                    yield {name: True} if name in kind.spelling.switches else {}


@pytest.mark.parametrize(("kind", "version"), RELEASES)
def test_a_release_takes_all_that_is_written_for_it(kind: ServerKind, version: str) -> None:
    offered = kind.offered(version)
    assert offered is not None
    configs = [*of_knobs(kind, offered), *of_playbooks(kind, version)]
    assert len(configs) > 20
    for flags in configs:
        assert lacking(kind, flags, offered) == [], flags
    always, _ = parse_flags(kind.always, vocabulary(kind.name, version))
    required = [*always, *(kind.spelling.own(name, offered) for name in ("host", "port", "model", "api_key"))]
    assert offered.lacking(required) == []


@pytest.mark.parametrize(
    ("version", "flag"),
    [
        ("0.4.10", "--cuda-graph-max-bs"),
        ("0.5.13", "--cuda-graph-max-bs"),
        ("0.5.14", "--cuda-graph-max-bs-decode"),
        ("0.5.23", "--cuda-graph-max-bs-decode"),
        (None, "--cuda-graph-max-bs-decode"),
    ],
)
def test_a_renamed_flag_is_written_as_the_release_has_it(version: str | None, flag: str) -> None:
    offered = SGLANG.offered(version)
    words = SGLANG.spelling.render({"max_cudagraph_capture_size": 64}, offered)
    assert words == [flag, "64"]
    assert SGLANG.spelling.arguments({"max_cudagraph_capture_size": None}, offered) == f"drop {flag}"
    tag = "" if version is None else f":v{version}-cu126"
    command = f"docker run lmsysorg/sglang{tag} python -m sglang.launch_server {flag} 64"
    parsed = parse_command(command)
    assert parsed.flags == {"max_cudagraph_capture_size": 64}
    assert str(parsed) == command


def test_a_trial_gets_the_name_that_the_program_offers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in a container says no version, but its help has the flag."""
    monkeypatch.setenv("VTUNE_CACHE", str(tmp_path / "cache"))
    program = tmp_path / "sglang"
    for flag in ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"):
        program.write_text(f"#!/bin/sh\necho '  --model-path M'\necho '  {flag} N'\n")
        program.chmod(0o755)
        target = ServerTarget(f"{program} serve --model-path m", env={"PATH": "/usr/bin:/bin"})
        words = shlex.split(target.launch_command({"max_cudagraph_capture_size": 64}))
        assert words[words.index("64") - 1] == flag


def test_what_a_release_does_not_take_is_said() -> None:
    assert VLLM.unavailable("max_num_partial_prefills", "0.33.0") == (
        "vLLM 0.33.0 has no --max-num-partial-prefills (releases from 0.7.3 to 0.26.0 have)"
    )
    assert SGLANG.unavailable("kv_cache_dtype", "0.4.0", "fp8") == (
        "SGLang 0.4.0 has no --kv-cache-dtype fp8_e4m3"
    )
    assert SGLANG.unavailable("kv_cache_dtype", "0.4.2", "fp8") is None
    assert SGLANG.unavailable("max_num_seqs", None, 8) is None
    around = Surroundings("sglang", offered=SGLANG.offered("0.5.2"))
    drafts = next(knob for knob in knobs_of("sglang") if knob.flag == SPECULATION)
    assert "does not speculate by n-grams" in around.absent(drafts, {})
