"""Errors of the engine that a user caused."""

from __future__ import annotations


class EngineUserError(Exception):
    """What the engine was given cannot work: a flag, a model, a file. The base of every such error.

    The message says what was wrong, where, and what to do. It is the engine's own base, because the engine
    imports no other package of this project.
    """


class ConfigError(EngineUserError):
    """A flag's value breaks a rule. The message names flag, value, rule and fix."""

    def __init__(self, flag: str, value: object, rule: str, fix: str) -> None:
        self.flag, self.value, self.rule, self.fix = flag, value, rule, fix
        super().__init__(f"--{flag.replace('_', '-')} {value}: {rule}. Fix: {fix}.")
