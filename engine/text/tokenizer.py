"""Text to token ids and back: a ``tokenizer.json`` without transformers, streaming text, chat templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.models.gguf_checkpoint import GgufCheckpoint
from engine.models.model_error import ModelError
from engine.models.weights import read_json
from engine.text.chat_template import compile_template, find_chat_template

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer as RustTokenizer

_REPLACEMENT = "\ufffd"
_MAX_CHARACTER_BYTES = 4
"""Bytes, and so tokens at most, of a UTF-8 character."""
_MAX_PENDING_TOKENS = 2 * _MAX_CHARACTER_BYTES


class ChatTemplateError(ValueError):
    """The model has no chat template, or the template refuses the messages."""


class NoTokenizerError(ValueError):
    """A text needs a tokenizer, and the model has none."""


class Tokenizer:
    """A model's tokenizer. Starts in about 0.2 s: transformers is not imported."""

    def __init__(
        self, rust: RustTokenizer, config: Mapping[str, Any], chat_template: str | None = None
    ) -> None:
        self._rust = rust
        self._config = config
        self.chat_template = chat_template

    @classmethod
    def load(cls, path: Path, load_format: str = "auto") -> Tokenizer:
        """From a model directory with a ``tokenizer.json``, or a ``.gguf`` file. Raises ModelError.

        A model of dummy weights may lack it: then a :class:`TokenIdsOnly` stands in.
        """
        from tokenizers import Tokenizer as RustTokenizer

        if path.suffix == ".gguf":
            gguf = GgufCheckpoint(path)
            rust = RustTokenizer.from_str(gguf.tokenizer_json())
            return cls(rust, gguf.tokenizer_config(), gguf.chat_template)
        directory = path if path.is_dir() else path.parent
        file = directory / "tokenizer.json"
        if not file.is_file():
            if load_format == "dummy":
                return TokenIdsOnly(file)
            raise ModelError(f"{file} is missing; name a directory that has one by --tokenizer")
        try:
            rust = RustTokenizer.from_file(str(file))
        except Exception as error:  # the binding raises bare Exception
            raise ModelError(f"{file}: not a readable tokenizer ({error})") from None
        config: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the older file, and the newer
            if (config_file := directory / name).is_file():
                config |= read_json(config_file)
        return cls(rust, config, find_chat_template(directory, config))

    @property
    def vocab_size(self) -> int:
        return int(self._rust.get_vocab_size())

    def to_json(self) -> str:
        """The whole tokenizer, as in a ``tokenizer.json``."""
        return str(self._rust.to_str())

    def token_id(self, token: str) -> int | None:
        """The id of a token as it is written in the vocabulary, e.g. "<|im_end|>"."""
        found = self._rust.token_to_id(token)
        return None if found is None else int(found)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # Unlike encode, a batch lets other threads run; without character offsets it is quicker too.
        return list(self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; an id outside the vocabulary adds nothing."""
        return str(self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, special tokens included (for logprobs)."""
        return self.decode((token_id,), skip_special_tokens=False)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """:meth:`token_text` of each."""
        alone = [[token_id] for token_id in token_ids]
        return list(self._rust.decode_batch(alone, skip_special_tokens=False))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a chat. Raises ChatTemplateError."""

        if self._template is None:
            raise ChatTemplateError("this model has no chat template; use the completions API")
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **variables,
            )
        except Exception as error:  # the template is the model's code, run on the client's data
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        values = {name: _content(self._config.get(name)) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @cached_property
    def _template(self) -> jinja2.Template | None:
        """The compiled template, in the same sandbox and with the same helpers that transformers gives it."""
        if self.chat_template is None:
            return None
        try:
            return compile_template(self.chat_template)
        except Exception as error:  # jinja's own, or what its compiler trips over
            raise ChatTemplateError(f"the model's chat template does not compile: {error}") from error


def _content(token: Any) -> str | None:
    """A special token's text, whether it is written plainly or with its properties."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


class TokenIdsOnly(Tokenizer):
    """Stands in for a tokenizer: prompts must be token ids, and the text of a token is its id: "<17>"."""

    def __init__(self, missing: Path) -> None:
        self._missing = missing
        self.chat_template = None

    @property
    def vocab_size(self) -> int:
        return 0

    def to_json(self) -> str:
        raise self._error("there is no tokenizer to give")

    def token_id(self, token: str) -> int | None:
        return None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise self._error("a text cannot be made into tokens")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"<{token_id}>" for token_id in token_ids)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self.token_text(token_id) for token_id in token_ids]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        raise ChatTemplateError(str(self._error("a chat cannot be made into a prompt")))

    def _error(self, what: str) -> NoTokenizerError:
        return NoTokenizerError(
            f"{what}: {self._missing} is missing. Give prompts as token ids, or start with --tokenizer"
        )


class IncrementalDetokenizer:
    """The text of a growing token sequence, handed out piece by piece.

    A token may be part of a character (UTF-8), and its text may depend on the one before (a leading space).
    So a window of tokens is decoded with and without the new ones, and their difference is handed out once
    it does not end within a character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._tokens: list[int] = []
        self._prefix = 0  # tokens[prefix:read] is the context that was handed out already
        self._read = 0
        self.text = ""
        """Everything handed out so far."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the new text that is certain ("" while within a character)."""
        start = len(self.text)
        for token_id in token_ids:
            self._tokens.append(token_id)
            self._advance(final=False)
        return self.text[start:]

    def finish(self) -> str:
        """The rest: what never became a whole character is handed out as U+FFFD."""
        start = len(self.text)
        self._advance(final=True)
        return self.text[start:]

    def _advance(self, final: bool) -> None:
        end = len(self._tokens)
        known = self._tokenizer.decode(self._tokens[self._prefix : self._read], self._skip)
        whole = self._tokenizer.decode(self._tokens[self._prefix :], self._skip)
        if whole.endswith(_REPLACEMENT) and not final:
            if end - self._read <= _MAX_PENDING_TOKENS:
                return
            # No character has that many bytes: the text is broken, and only its tail may still become whole.
            end -= _MAX_CHARACTER_BYTES
            whole = self._tokenizer.decode(self._tokens[self._prefix : end], self._skip)
        if len(whole) > len(known):
            self.text += whole[len(known) :]
            self._prefix, self._read = self._read, end
