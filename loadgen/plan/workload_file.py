"""A workload of your own, as a JSON file of request classes, beside the presets.

    {"classes": [
        {"name": "question", "weight": 4, "prompt": {"mean": 300, "spread": 0.5}, "output": 80},
        {"name": "document", "weight": 1, "prompt": 6000, "output": 200, "shared_prefix": 1000}]}

Lengths are tokens; ``spread`` 0.5 is uniform within half of the mean to either side. ``weight`` (1 where left
out), ``priority``, ``shared_prefix`` and ``prefix_groups`` are those of
:class:`loadgen.plan.workload.RequestClass`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadgen.plan.workload import (
    DEFAULT_VOCAB_SIZE,
    PRESETS,
    Length,
    RequestClass,
    Workload,
    WorkloadError,
    check_fit,
    preset,
)

_WHOLE = {"priority": 0, "shared_prefix": 0, "prefix_groups": 1}
_KEYS = {"name", "weight", "prompt", "output", *_WHOLE}


def is_file(workload: str) -> bool:
    """Whether ``--workload`` names a file rather than a preset."""
    return workload not in PRESETS and (workload.endswith(".json") or Path(workload).is_file())


def workload_of(
    workload: str,
    *,
    max_model_len: int,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    input_len: int | None = None,
    output_len: int | None = None,
    scale: float | None = None,
) -> Workload:
    """A preset (see :func:`loadgen.plan.workload.preset`), or the workload in a file. Raises WorkloadError.

    A file's lengths are meant as they stand: without ``scale`` they are not fitted to the context.
    """
    if not is_file(workload):
        return preset(
            workload,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            input_len=input_len,
            output_len=output_len,
            scale=scale,
        )
    if input_len is not None or output_len is not None:
        raise WorkloadError(f"workload {workload}: the file has the lengths; leave out --input-len and so on")
    read = replace(read_workload(Path(workload)), vocab_size=vocab_size)
    if scale is not None:
        classes = tuple(_scaled(cls, scale) for cls in read.classes)
        read = replace(read, classes=classes, note=f"prompts scaled x{scale:.3g}")
    check_fit(workload, read.classes, max_model_len)
    return read


def read_workload(path: Path) -> Workload:
    """Raises WorkloadError, which names file, class and key."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise WorkloadError(f"workload {path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"workload {path}: no JSON ({error})") from None
    if not isinstance(data, dict) or not isinstance(data.get("classes"), list) or not data["classes"]:
        raise WorkloadError(
            f'workload {path}: write {{"classes": [{{"name": "short", "prompt": 300, "output": 80}}, …]}}. '
            "A trace is replayed with --trace or --replay"
        )
    classes = tuple(_class(f"workload {path}, class {n}", item) for n, item in enumerate(data["classes"], 1))
    names = [cls.name for cls in classes]
    if len(set(names)) < len(names):
        raise WorkloadError(f"workload {path}: two classes of one name ({', '.join(names)})")
    return Workload(path.stem, classes)


def _class(where: str, item: Any) -> RequestClass:
    if not isinstance(item, dict):
        raise WorkloadError(f"{where}: no JSON object")
    if unknown := sorted(set(item) - _KEYS):
        raise WorkloadError(f"{where}, key {unknown[0]!r}: unknown; known are {', '.join(sorted(_KEYS))}")
    name, weight = item.get("name"), item.get("weight", 1)
    if not isinstance(name, str) or not name:
        raise WorkloadError(f"{where}, key 'name': {name!r} is no name")
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise WorkloadError(f"{where}, key 'weight': {weight!r} is no number")
    whole = {key: item.get(key, default) for key, default in _WHOLE.items()}
    for key, value in whole.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise WorkloadError(f"{where}, key {key!r}: {value!r} is no whole number")
    prompt, output = (_length(f"{where}, key {key!r}", item.get(key)) for key in ("prompt", "output"))
    return RequestClass(name, weight, prompt, output, **whole)


def _length(where: str, value: Any) -> Length:
    parts = value if isinstance(value, Mapping) else {"mean": value}
    mean, spread = parts.get("mean"), parts.get("spread", 0.0)
    whole = isinstance(mean, int) and not isinstance(mean, bool)
    share = isinstance(spread, int | float) and not isinstance(spread, bool)
    if mean is None or not whole or not share or set(parts) - {"mean", "spread"}:
        raise WorkloadError(f'{where}: {value!r} is no length; write 300 or {{"mean": 300, "spread": 0.5}}')
    return Length(mean, float(spread))


def _scaled(cls: RequestClass, factor: float) -> RequestClass:
    prompt = cls.prompt.scaled(factor)
    return replace(cls, prompt=prompt, shared_prefix=min(round(cls.shared_prefix * factor), prompt.low - 1))
