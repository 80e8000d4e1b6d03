"""A shell text taken apart as a POSIX shell takes it: statements, words, quotes, variables, redirections.

Nothing is run, and nothing is looked up outside the text: a variable has the value that the text gives it.
What has none there, and what only a run would tell (``$(…)``), stays in its word as ``${NAME}`` or ``$(…)``
(``servers.flags.words.UNKNOWN``). Beyond POSIX: bash's arrays, quotes and blanks of word processors, lines
continued as Windows and PowerShell do, prompts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from servers.connection import masked
from servers.flags.words import UNKNOWN, FlagError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_CONTINUED = re.compile(r"[\\^`](?:[ \t]+#[^\n]*|[ \t]*)(?:\n|\Z)")
"""A line goes on in the next: of a POSIX shell, of Windows and of PowerShell."""
_BLANKS = re.compile(r"[ \t]+")
_COMMENT = re.compile(r"#[^\n]*")
_OPERATOR = re.compile(r"&&|\|\||\|&|;;|[;&|\n]")
_REDIRECTION = re.compile(r"(?:\d*|&)(?P<here><<-?(?!<))|(?:\d*|&)(?:<<<|>>|>\||<>|[<>]&?)(?!\()")
_PLACEHOLDER = re.compile(r"<([A-Za-z][\w ./-]*)>")
"""``<model>``, as instructions write what is to be filled in."""
_NEXT_FLAG = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)+[ \t]*--?[A-Za-z]")
"""Lines up to one that begins with a flag."""
_PARAMETER = re.compile(r"(?:env:)?(\w+|[@*#?])(\[[@*]\])?(?:(:?)([-=+?])(.*))?", re.DOTALL)
_NAME = re.compile(r"(?:env:)?([A-Za-z_]\w*)|\d|[@*#?$!]")
_PROMPT = re.compile(r"^(?:\([\w.-]+\) ?)?(?:\w\S*@\S+[#$%]|[$❯%]|PS [^>\n]*>)[ \t]+", re.MULTILINE)
_FENCE = re.compile(r"^[ \t]*```.*$", re.MULTILINE)
_BLANK = str.maketrans({"\u00a0": " ", "\u202f": " ", "\u200b": None, "\ufeff": None, "\r": None})
_DOUBLE, _SINGLE = "“”„‟", "‘’‚‛"
"""What word processors and chat programs make of quotes."""
_STRAIGHT = str.maketrans({**dict.fromkeys(_DOUBLE, '"'), **dict.fromkeys(_SINGLE, "'")})
_ESCAPES = {"n": "\n", "t": "\t"}
_DECLARING = frozenset({"export", "declare", "typeset", "local", "readonly"})
_OPENING = frozenset({"if", "while", "until", "for", "case", "select"})
_CLOSING = frozenset({"fi", "done", "esac"})
_KEYWORDS = frozenset({*_OPENING, *_CLOSING, "then", "else", "elif", "do", "{", "}", "!", "exec", "time"})
_TESTS = frozenset({"[", "[[", "test"})
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ash"})

Value = str | list[str] | None
"""Of a variable: a list of an array, None where it is set and not known to what."""


@dataclass(frozen=True)
class Statement:
    """One command. ``env``: what is exported before it, and what it is given itself."""

    words: list[str]
    env: dict[str, str] = field(default_factory=dict)


def split_statements(text: str, variables: Mapping[str, Value] | None = None) -> list[Statement]:
    """The commands of a text, in their order, without those that only set variables. ``variables``: what is
    set before.

    Raises FlagError for quotes and parentheses that do not match, and for flags that a comment cuts off.
    """
    return _Reader(_plain(text), variables or {}).statements()


def split_words(text: str, variables: Mapping[str, Value] | None = None) -> tuple[dict[str, str], list[str]]:
    """(environment, words) of the first command. Raises FlagError."""
    first = next(iter(split_statements(text, variables)), Statement([]))
    return first.env, first.words


def expanded(text: str, variables: Mapping[str, Value]) -> str:
    """``text`` with its variables filled in and ``$$`` made a dollar, as by Compose. Raises FlagError."""
    return _Reader(text, variables).filled()


def is_shell(word: str) -> bool:
    return word.rsplit("/", 1)[-1] in _SHELLS


def quoted(word: str) -> str:
    """A word as one types it; what was not known in it is left to the shell."""
    if "$" in word and UNKNOWN.search(word):
        return '"' + re.sub(r'([\\"`])', r"\\\1", word) + '"'
    return shlex.quote(word)


def joined(words: Iterable[str]) -> str:
    return " ".join(map(quoted, words))


def _plain(text: str) -> str:
    text = _FENCE.sub("", text.translate(_BLANK)).strip()
    if len(text) > 1 and text[0] == text[-1] == "`" and text.count("`") == 2:
        text = text[1:-1]
    return _PROMPT.sub("", text)


@dataclass
class _Fields:
    """Words in the making."""

    done: list[str] = field(default_factory=list)
    current: str | None = None

    def add(self, text: str) -> None:
        self.current = (self.current or "") + text

    def cut(self) -> None:
        if self.current is not None:
            self.done.append(self.current)
            self.current = None

    def add_split(self, text: str) -> None:
        """As an expansion without quotes: blanks in it part words."""
        for piece in re.split(r"(\s+)", text):
            if piece.isspace():
                self.cut()
            elif piece:
                self.add(piece)

    def add_each(self, values: list[str]) -> None:
        """Each a word of its own, beside what stands around them."""
        for at, value in enumerate(values):
            if at:
                self.cut()
            self.add(value)


class _Reader:
    def __init__(self, text: str, variables: Mapping[str, Value]) -> None:
        self._text, self._at = text, 0
        self._variables: dict[str, Value] = dict(variables)
        self._exported: dict[str, str] = {}
        self._found: list[Statement] = []
        self._conditions = self._parentheses = 0
        self._guarded = self._commented = False
        self._heres: list[tuple[str, list[str]]] = []
        self._clear()

    def _clear(self) -> None:
        self._words: list[str] = []
        self._env: dict[str, Value] = {}

    def statements(self) -> list[Statement]:
        while self._at < len(self._text):
            if not (self._skip(_BLANKS) or self._skip(_CONTINUED)):
                self._token()
        self._finish("\n")
        return self._found

    def filled(self) -> str:
        fields = _Fields(current="")
        while self._at < len(self._text):
            if self._text.startswith("$$", self._at):
                fields.add("$")
                self._at += 2
            elif self._text[self._at] == "$":
                self._dollar(fields, within=True)
            else:
                fields.add(self._text[self._at])
                self._at += 1
        return " ".join([*fields.done, fields.current or ""])

    def _skip(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        if match:
            self._at = match.end()
        return match

    def _error(self, what: str) -> FlagError:
        return FlagError(f"the command's {what}: {masked(self._text)[:200]}")

    def _token(self) -> None:
        if self._skip(_COMMENT):
            self._commented = bool(self._words)
        elif hint := self._skip(_PLACEHOLDER):
            self._words.append(f"${{{hint[1]}}}")
        elif redirection := self._skip(_REDIRECTION):
            self._skip(_BLANKS)
            target = self._word(split=False) or [""]
            if redirection["here"]:
                self._heres.append((target[0], self._words))
        elif self._text[self._at] == "\n" and self._goes_on():
            self._at += 1
        elif operator := self._skip(_OPERATOR):
            self._finish(operator[0])
        elif self._text[self._at] in "()":
            self._parenthesis()
        elif self._assigns() and (match := self._skip(_ASSIGNMENT)):
            self._assign(*match.groups())
        else:
            self._words += self._word()

    def _goes_on(self) -> bool:
        """Whether the next line is flags of this command: its text lost the backslashes. Raises FlagError
        where a comment stands between, which ends the command for a shell."""
        match = _NEXT_FLAG.match(self._text, self._at)
        if not (match and self._words):
            return False
        if (self._commented or "#" in match[0]) and not self._words[0].startswith("-"):
            flag = match[0].split()[-1] + self._text[match.end() :].split()[0]
            raise FlagError(
                f"a comment ends the command before {flag}: the shell does not pass on what follows it. "
                "Delete the comment, or these flags"
            )
        return True

    def _assigns(self) -> bool:
        """Whether ``A=b`` is an assignment here, and not a word."""
        return all(word in _KEYWORDS or word == "env" for word in self._words) or (
            self._words[0] in _DECLARING
        )

    def _assign(self, name: str, more: str) -> None:
        value: Value
        if self._text.startswith("(", self._at):
            self._at += 1
            value = self._items()
        else:
            value = "".join(self._word(split=False))
        if more:
            before = {name: "", **self._variables, **self._env}[name]
            if before is None:
                value = None
            elif isinstance(before, list):
                value = [*before, *([value] if isinstance(value, str) else value)]
            else:
                value = before + (value if isinstance(value, str) else " ".join(value))
        self._env[name] = value

    def _items(self) -> list[str]:
        """Of an array, up to its parenthesis."""
        items: list[str] = []
        while not self._skip(re.compile(r"\)")):
            if self._at >= len(self._text):
                raise self._error("parentheses do not match")
            if not (self._skip(re.compile(r"\s+")) or self._skip(_CONTINUED) or self._skip(_COMMENT)):
                before = self._at
                items += self._word()
                if self._at == before:
                    raise self._error(f"{self._text[before]!r} stands in an array. Put it in quotes")
        return items

    def _parenthesis(self) -> None:
        opens = self._text[self._at] == "("
        self._at += 1
        if opens and not [word for word in self._words if word not in _KEYWORDS]:
            self._parentheses += 1
        elif opens and len(self._words) == 1 and self._skip(re.compile(r"\s*\)")):
            self._clear()  # the name of a function
        elif not opens and self._parentheses:
            self._parentheses -= 1
            self._finish(";")
        elif not opens and (self._conditions or self._words[:1] == ["case"]):
            self._finish(";") if self._words[:1] == ["case"] else self._clear()  # a pattern of "case"
        else:
            raise self._error("parentheses mean something to a shell there. Put them in single quotes")

    def _finish(self, operator: str) -> None:
        while self._words and self._words[0] in _KEYWORDS:
            self._conditions += (self._words[0] in _OPENING) - (self._words[0] in _CLOSING)
            if self._words[0] in ("for", "select", "case"):
                self._variables |= dict.fromkeys(self._words[1:2])
                self._words = []
            self._words = self._words[1:]
        if self._words and self._words[0] == "env" and self._env:
            self._words = self._words[1:]
        words, env = self._words, self._env
        if words and words[0] not in _DECLARING:
            given = {name: _text(value) for name, value in env.items() if value is not None}
            if words[0] == "eval":
                for inner in split_statements(" ".join(words[1:]), self._variables):
                    self._found.append(Statement(inner.words, {**self._exported, **given, **inner.env}))
            else:
                self._found.append(Statement(words, {**self._exported, **given}))
        else:
            self._set(env, words)
        guarded = self._guarded or (bool(words) and words[0] in _TESTS)
        self._guarded = operator == "||" or (operator == "&&" and guarded)
        self._clear()
        self._commented = False
        if operator == "\n":
            self._skip_heres()

    def _set(self, env: Mapping[str, Value], words: list[str]) -> None:
        certain = not (self._conditions or self._guarded)
        self._variables |= {name: value if certain else None for name, value in env.items()}
        if words[:1] == ["export"]:
            for name in {*env, *words[1:]} & self._variables.keys():
                if (value := self._variables[name]) is not None:
                    self._exported[name] = _text(value)

    def _skip_heres(self) -> None:
        """Texts that ``<<EOF`` brings along: a script for a shell, else nothing of the command's."""
        for end, words in self._heres:
            match = re.compile(rf"(.*?)^\s*{re.escape(end)}[ \t]*$", re.DOTALL | re.MULTILINE).match(
                self._text, self._at
            )
            if match is None:
                raise self._error(f"text has no end ({end})")
            self._at = match.end()
            if any(map(is_shell, words)):
                words += ["-c", match[1]]
        self._heres = []

    def _word(self, split: bool = True) -> list[str]:
        """The words up to the next blank or operator: none, or several where a variable holds them."""
        fields = _Fields()
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in " \t\n;&|<>()" or _CONTINUED.match(self._text, self._at):
                if char in "<>" and self._text.startswith("(", self._at + 1):
                    self._at += 1
                    fields.add("$" + self._balanced("(", ")"))
                    continue
                break
            if char in "'\"" or char in _SINGLE or char in _DOUBLE:
                self._quotes(char, fields)
            elif char == "$":
                self._dollar(fields, within=not split)
            elif char == "`":
                fields.add(self._substitution())
            else:
                self._at += char == "\\"
                fields.add(self._text[self._at : self._at + 1])
                self._at += 1
        fields.cut()
        return fields.done

    def _quotes(self, opening: str, fields: _Fields) -> None:
        self._at += 1
        alike = next((kind for kind in (_SINGLE, _DOUBLE) if opening in kind), "")
        straight = opening.translate(_STRAIGHT)
        closing = alike if any(char in alike for char in self._text[self._at :]) else straight
        fields.add("")
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in closing:
                self._at += 1
                return
            if straight == '"' and char == "$":
                self._dollar(fields, within=True)
            elif straight == '"' and char == "`":
                fields.add(self._substitution())
            elif straight == '"' and char == "\\" and self._text[self._at + 1 : self._at + 2] in '$`"\\\n':
                fields.add(self._text[self._at + 1 : self._at + 2].strip("\n"))
                self._at += 2
            else:  # inside, quotes of the other kind were made typographic as well
                other = char in (_DOUBLE if straight == "'" else _SINGLE)
                fields.add(char.translate(_STRAIGHT) if other else char)
                self._at += 1
        raise self._error(f"quotes do not match (no closing {straight})")

    def _dollar(self, fields: _Fields, within: bool) -> None:
        """``within``: quotes, where blanks part no words."""
        following = self._text[self._at + 1 : self._at + 2]
        if following == "'" and not within:
            match = self._skip(re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL))
            if match is None:
                raise self._error("quotes do not match")
            fields.add(re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), match[1]))
            return
        self._at += 1
        if following == '"' and not within:
            return
        if following == "(":
            fields.add("$" + self._balanced("(", ")"))
        elif following == "{":
            self._filled_in(self._parameter(self._balanced("{", "}")[1:-1]), fields, within)
        elif match := self._skip(_NAME):
            self._filled_in(self._parameter(match[1] or match[0]), fields, within)
        else:
            fields.add("$")

    def _filled_in(self, found: tuple[str | list[str], bool], fields: _Fields, within: bool) -> None:
        value, known = found
        if isinstance(value, list) and within:
            fields.add_each(value)
        elif within or not known:
            fields.add(_text(value))
        else:
            fields.add_split(_text(value))

    def _balanced(self, opening: str, closing: str) -> str:
        depth = 0
        for at in range(self._at, len(self._text)):
            depth += (self._text[at] == opening) - (self._text[at] == closing)
            if not depth:
                begin, self._at = self._at, at + 1
                return self._text[begin : self._at]
        raise self._error(f"'${opening}' has no end")

    def _substitution(self) -> str:
        end = self._text.find("`", self._at + 1)
        if end < 0:
            raise self._error("quotes do not match (no closing `)")
        inner = self._text[self._at + 1 : end]
        self._at = end + 1
        return f"$({inner})"

    def _parameter(self, text: str) -> tuple[str | list[str], bool]:
        """(value, whether it is known) of what stands within ``${…}``."""
        unknown = f"${{{text}}}", False
        match = _PARAMETER.fullmatch(text)
        if match is None:
            return unknown
        name, each, colon, operator, word = match.groups()
        known = {**self._variables, **self._env}
        value = known.get(name)
        if operator in ("-", "=") and (name not in known or (colon and value == "")):
            return expanded(word.strip("\"'"), known), True
        if value is None:
            return unknown
        if operator == "+":
            return expanded(word.strip("\"'"), known) if value or not colon else "", True
        if isinstance(value, list) and not each:
            return (value or [""])[0], True
        return value, True


def _text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)
