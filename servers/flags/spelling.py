"""How a kind of server spells vLLM's flags: the rest of this package thinks in vLLM's names."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from servers.flags.words import FlagError, render, vocabulary


@dataclass(frozen=True, eq=False)
class Spelling:
    """vLLM's own where ``names`` is empty. Else switches have no ``--no-`` form: one is written only where it
    departs from the server's default."""

    label: str
    """The server's name for people."""
    names: Mapping[str, str] = field(default_factory=dict)
    """vLLM's name -> the server's, where it means the same."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings that the server takes -> the one that is written."""
    switches: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    """vLLM's switch -> (the server's switch, vLLM's value that the server's switch stands for)."""
    values: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)
    """vLLM's name -> those of its values that the server spells otherwise."""
    others: Mapping[str, str] = field(default_factory=dict)
    """vLLM's name -> the server's flag that says it in another way, by ``write`` and ``read``."""
    many: frozenset[str] = frozenset()
    """The server's flags that take several words."""
    write: Callable[[str, Any, Mapping[str, Any]], dict[str, Any] | None] | None = None
    """(name, value, all flags) -> what the server has for it; None: as ``names`` and ``switches`` say."""
    read: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Takes out of the server's flags what is not said one by one, and gives it in vLLM's names."""
    drafts: tuple[str, int] | None = None
    """The server's flag that counts the tokens of a draft, and by how many more than the drafts."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Spellings of older releases -> the one that the newest takes."""

    def own(self, flag: str, offered: Container[str] | None = None) -> str:
        """The server's name of a flag. ``offered``: the names that its release takes; None: of the newest."""
        switch = self.switches.get(flag)
        name = switch[0] if switch else {**self.names, **self.others}.get(flag, flag)
        return self._fitting(name, offered)

    def _fitting(self, name: str, offered: Container[str] | None) -> str:
        if offered is None or name in offered:
            return name
        older = (old for old, new in self.renamed.items() if new == name and old in offered)
        return next(older, name)

    def depends_on_release(self, flags: Mapping[str, Any]) -> bool:
        """Whether one of vLLM's ``flags`` has another name in some releases."""
        return not {self.own(name) for name in flags}.isdisjoint(self.renamed.values())

    def has(self, flag: str) -> bool:
        """Whether the server has a counterpart of vLLM's ``flag``."""
        return not self.names or flag in self.names or flag in self.switches or flag in self.others

    def to_own(self, flags: Mapping[str, Any], offered: Container[str] | None = None) -> dict[str, Any]:
        """vLLM's flags by the server's names; what only the server has passes through. ``offered``: as of
        :meth:`own`.

        Raises FlagError for a flag or a value of vLLM's that the server has no counterpart for.
        """
        if not self.names:
            return dict(flags)
        found: dict[str, Any] = {}
        for name, value in flags.items():
            if name in vocabulary("vllm").kinds and not self.has(name):
                raise FlagError(f"--{name.replace('_', '-')}: {self.label} has no such flag. Leave it out.")
            written = self.write(name, value, flags) if self.write else None
            if written is not None:
                found |= written
            elif name in self.switches:
                switch, stands_for = self.switches[name]
                if value == stands_for:
                    found[switch] = True
            else:
                spelled = self.values.get(name)
                found[self.names.get(name, name)] = spelled.get(value, value) if spelled else value
        return {self._fitting(name, offered): value for name, value in found.items()}

    def from_own(self, flags: Mapping[str, Any]) -> dict[str, Any]:
        """The server's flags by vLLM's names; what vLLM does not have keeps its own."""
        others = {**self.aliases, **self.renamed}
        given = {others.get(name, name): value for name, value in flags.items()}
        found = self.read(given) if self.read else {}
        back = {theirs: ours for ours, theirs in self.names.items()}
        switches = {theirs: (ours, value) for ours, (theirs, value) in self.switches.items()}
        for name, value in given.items():
            if name in switches and value is True:
                ours, stands_for = switches[name]
                found[ours] = stands_for
            else:
                found[back.get(name, name)] = value
        return found

    def render(self, flags: Mapping[str, Any], offered: Container[str] | None = None) -> list[str]:
        """vLLM's ``flags`` as words for the server. ``offered``: as of :meth:`own`. Raises FlagError."""
        typed = self.to_own(flags, offered)
        if self.names:
            typed = {name: value for name, value in typed.items() if value is not False}
        return render(typed, self.many)

    def arguments(self, changes: Mapping[str, Any], offered: Container[str] | None = None) -> str:
        """vLLM's ``changes`` as one types them; a dropped flag is named in words. ``offered``: as of
        :meth:`own`."""
        kept = {name: value for name, value in changes.items() if value is not None}
        dropped = [self.own(name, offered) for name, value in changes.items() if value is None]
        dropped += [self.own(name, offered) for name, value in kept.items() if self._is_default(name, value)]
        drafts = kept.get("speculative_config", {})
        if self.drafts and drafts and "method" not in drafts:  # unknown to vLLM: only the number
            flag, more = self.drafts
            kept[flag] = kept.pop("speculative_config")["num_speculative_tokens"] + more
        words = [f"drop --{name.replace('_', '-')}" for name in dropped]
        return ", ".join(filter(None, [shlex.join(self.render(kept, offered)), *words]))

    def _is_default(self, name: str, value: Any) -> bool:
        """Whether a switch is wanted as it is without the server's flag."""
        return name in self.switches and value != self.switches[name][1]
