"""Flags that a container's entry point makes of its environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from servers.flags.defaults import NAMES
from servers.flags.words import FlagError
from servers.kind import ServerKind
from servers.kinds import KINDS

_PUBLISHED = re.compile(r"(docker\.io/)?(vllm/vllm-openai|lmsysorg/sglang)(:(?!.*sagemaker).*)?")
"""The projects' own images, whose entry point reads no variables."""
_FLAG = re.compile(r"(?:^|\s)--([a-z][\w-]*)")
_SIZES = (*NAMES, "max_model_len")


def kind_of_image(image: str) -> ServerKind | None:
    """The kind whose program an image is named after; None: it may hold anything."""
    return next((kind for kind in KINDS.values() if kind.program in image), None)


def variables_of(kind: ServerKind) -> str:
    """How the names begin that the entry point of the kind's SageMaker image makes flags of (vLLM's
    ``sagemaker-entrypoint.sh``; AWS's image of SGLang has the like)."""
    return f"SM_{kind.program.upper()}_"


def sagemaker_start(
    image: str, env: Mapping[str, str], words: Sequence[str]
) -> tuple[ServerKind, list[str]] | None:
    """(kind, its flags) that such an entry point starts; None: the image is no such one.

    ``words``: behind the image. Raises FlagError where the variables or the words are not what it reads.
    """
    for kind in KINDS.values():
        prefix = variables_of(kind)
        given = {name[len(prefix) :]: value for name, value in env.items() if name.startswith(prefix)}
        of_kind = kind_of_image(image) is kind and "sagemaker" in image
        if not given and not of_kind:
            continue
        if not given and not words:
            raise FlagError(f"the image {image!r} takes its flags from variables {prefix}…: give these, too")
        if given and _PUBLISHED.fullmatch(image):
            raise FlagError(f"the image {image!r} does not read {prefix}…: give flags behind it instead")
        if given and words:
            raise FlagError(f"flags stand both in {prefix}… and behind the image {image!r}: give them once")
        if given:
            pairs = (("--" + name.lower().replace("_", "-"), value) for name, value in given.items())
            return kind, [word for pair in pairs for word in pair if word]
    return None


def refuse_unread(image: str, env: Mapping[str, str], flags: Mapping[str, object]) -> None:
    """Raises FlagError for a variable that looks like a flag which the command does not give: the image may
    read it, or not."""
    for name, value in env.items():
        sizes = [size for size in _SIZES if name.lower().endswith(size)]
        named = [found.replace("-", "_") for found in _FLAG.findall(value)]
        for flag in (*sizes, *named):
            if flag not in flags:
                raise FlagError(
                    f"whether the image {image!r} makes a flag of its variable {name}, is not known here. "
                    f"If it does, give --{flag.replace('_', '-')} as a flag, else leave the variable out"
                )
