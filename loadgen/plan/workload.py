"""What is sent: request classes, workloads and the fixed, hashed schedule made from them.

Prompts are token ids drawn from the seed. No two requests begin with the same token (as long as the
vocabulary lasts), so a prefix cache finds nothing unless a class shares a prefix on purpose.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from loadgen.plan.arrivals import Arrival
from servers.errors import UserError

Mode = Literal["open", "closed", "semi-open"]
PRESETS = ("chat", "rag", "batch", "mixed", "random", "shared-prefix")
REFERENCE_CONTEXT = 32768
"""The context for which the presets' prompt lengths are written; shorter contexts scale them down."""
DEFAULT_VOCAB_SIZE = 32000
"""For a server whose vocabulary is unknown: every common model has at least this many ids."""
_FASTEST_STREAM = 500
"""Output tokens per second that no single stream of today's servers exceeds."""
_MOST_PROMPT_TOKENS = 2_000_000
"""Most requests of a schedule whose number was not asked for: some 75 MB."""
MAX_PROMPT_TOKENS = 100_000_000
"""In one schedule: some 4 GB."""
MAX_VOCAB_SIZE = 10_000_000
_DECK = 20
_SALT_TOKENS, _SALTED_FROM = 3, 50
"""First tokens that a salt replaces, and the requests whose tokens it is drawn from."""
_MIN_PROMPT = 16


class WorkloadError(UserError):
    """A workload cannot be built as asked; the message names what, why and the fix."""


@dataclass(frozen=True)
class Length:
    """A number of tokens, uniform on [mean (1 - spread), mean (1 + spread)]; spread 0 is a fixed length."""

    mean: int
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.mean < 1 or not 0 <= self.spread < 1:
            raise WorkloadError(f"{self}: mean must be at least 1 and spread in [0, 1)")

    @property
    def low(self) -> int:
        return max(1, round(self.mean * (1 - self.spread)))

    @property
    def high(self) -> int:
        return max(self.low, round(self.mean * (1 + self.spread)))

    def scaled(self, factor: float, minimum: int = 1) -> Length:
        return replace(self, mean=max(minimum, round(self.mean * factor)))

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high, endpoint=True))

    def __str__(self) -> str:
        return str(self.mean) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class RequestClass:
    """One kind of request. ``prompt`` counts the shared prefix too.

    ``priority`` is vLLM's: lower goes first.
    """

    name: str
    weight: float
    prompt: Length
    output: Length
    priority: int = 0
    shared_prefix: int = 0
    """Leading tokens that the requests of a group have in common."""
    prefix_groups: int = 1

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise WorkloadError(f"class {self.name}: weight {self.weight} must be positive")
        if not 0 <= self.shared_prefix < self.prompt.low:
            raise WorkloadError(
                f"class {self.name}: a shared prefix of {self.shared_prefix} tokens leaves nothing of a "
                f"prompt of {self.prompt.low}; make it shorter"
            )
        if self.prefix_groups < 1:
            raise WorkloadError(f"class {self.name}: prefix_groups must be at least 1")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: str
    text: str
    recorded: str | None = None
    """JSON of the whole message where it holds more than a role and a text: parts, calls of tools."""

    @property
    def body(self) -> dict[str, Any]:
        """As it is sent."""
        whole: dict[str, Any] = (
            json.loads(self.recorded) if self.recorded else {"role": self.role, "content": self.text}
        )
        return whole


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a schedule. ``intended``: seconds after the start (0.0 in a closed loop)."""

    index: int
    cls: str
    intended: float
    prompt_token_ids: tuple[int, ...] | None
    prompt: str | None
    max_tokens: int
    ignore_eos: bool = True
    temperature: float = 0.0
    priority: int = 0
    sampling: tuple[tuple[str, Any], ...] = ()
    """Further fields of the body; they win over ``temperature``."""
    messages: tuple[Message, ...] | None = None
    """A chat, in place of a prompt."""
    follows: int | None = None
    """The turn before, by index: this one is sent ``think`` seconds after its answer has ended, and
    ``intended`` does not matter."""
    think: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """Everything that will be sent, fixed before the start. ``sha256`` covers requests, mode and cap."""

    requests: tuple[PlannedRequest, ...]
    warmup: tuple[PlannedRequest, ...]
    """Sent before the start on prompts of their own, never measured; their index is negative."""
    mode: Mode
    concurrency: int | None
    duration: float | None
    sha256: str
    description: str
    seed: int | None = None

    def without_priorities(self) -> Schedule:
        """For a server without priority scheduling, which refuses any other than 0. It is the same load."""
        return self._with_each(lambda request: replace(request, priority=0))

    def ended_by_the_model(self) -> Schedule:
        """Without ``ignore_eos``, which is no field of OpenAI's: answers may end before their length."""
        return self._with_each(lambda request: replace(request, ignore_eos=False))

    def as_chat(self) -> Schedule:
        """With a message of the user for each prompt of token ids: a word for each token, the same word for
        the same id, so that what prompts share stays. Most tokenizers have these words as one token each;
        the chat template adds its own."""
        return self._with_each(_chatting)

    def salted(self, rng: np.random.Generator) -> Schedule:
        """With other first tokens, the same ones for every prompt: what an earlier run of the same seed left
        in a prefix cache is not found, what the prompts of this one share is. It is the same load; prompts
        that are text stay as they are."""
        ids = [token for r in self.requests[:_SALTED_FROM] for token in (r.prompt_token_ids or ())]
        if not ids:
            return self
        salt = tuple(map(int, rng.choice(ids, _SALT_TOKENS)))

        def with_salt(request: PlannedRequest) -> PlannedRequest:
            own = request.prompt_token_ids
            return (
                request
                if own is None
                else replace(request, prompt_token_ids=(*salt[: len(own)], *own[_SALT_TOKENS:]))
            )

        return self._with_each(with_salt)

    def _with_each(self, change: Callable[[PlannedRequest], PlannedRequest]) -> Schedule:
        """The same load with every request changed, the warm-up's too."""
        return replace(
            self, requests=tuple(map(change, self.requests)), warmup=tuple(map(change, self.warmup))
        )


@dataclass(frozen=True)
class Workload:
    """A mix of request classes and the token ids that prompts are drawn from."""

    name: str
    classes: tuple[RequestClass, ...]
    vocab_size: int = DEFAULT_VOCAB_SIZE
    note: str = ""
    """How the lengths were scaled, for the report."""

    def __post_init__(self) -> None:
        if not self.classes:
            raise WorkloadError(f"workload {self.name} has no classes")
        if self.vocab_size < 8:
            raise WorkloadError(f"a vocabulary of {self.vocab_size} ids is too small to draw prompts from")
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise WorkloadError(f"a vocabulary of {self.vocab_size} ids: no model has so many")

    @property
    def description(self) -> str:
        total = sum(cls.weight for cls in self.classes)
        parts = (
            f"{cls.name} {cls.weight / total:.0%} ({cls.prompt} in, {cls.output} out"
            + (f", {cls.shared_prefix} shared)" if cls.shared_prefix else ")")
            for cls in self.classes
        )
        return f"{self.name}: {'; '.join(parts)}" + (f"; {self.note}" if self.note else "")

    def schedule(
        self,
        *,
        seed: int,
        arrival: Arrival,
        num_requests: int | None = None,
        duration: float | None = None,
        max_concurrency: int | None = None,
        warmup: int | None = None,
        temperature: float = 0.0,
    ) -> Schedule:
        """Draw the schedule of ``seed``. ``warmup``: requests before the start; None is one of each class.

        Arrival times, classes and prompts come from child streams of the one generator, so the same
        seed gives the same prompts at another rate. Raises ArrivalError, WorkloadError.
        """
        times_rng, mix_rng, length_rng, prompt_rng = np.random.default_rng(seed).spawn(4)
        if num_requests is None and duration is not None and arrival.concurrency is not None:
            num_requests = self._enough(arrival.concurrency, duration)
        times = arrival.times(times_rng, num_requests=num_requests, duration=duration)
        if len(times) == 0:
            raise WorkloadError(
                f"{arrival.description} for {duration:g} s gives no request; raise the rate or the duration"
            )
        mode, cap = mode_of(arrival, max_concurrency)
        num_warmup = len(self.classes) if warmup is None else warmup
        self._check_size(len(times) + num_warmup)
        prompts = PromptSource(self.vocab_size, prompt_rng)
        mix = _deal(self.classes, len(times), mix_rng)
        requests = tuple(
            _plan(index, cls, float(times[index]), prompts, length_rng, temperature)
            for index, cls in enumerate(mix)
        )
        warmups = tuple(
            warm(_plan(-1 - i, cls, 0.0, prompts, length_rng, temperature))
            for i, cls in enumerate(self.classes[k % len(self.classes)] for k in range(num_warmup))
        )
        return Schedule(
            requests=requests,
            warmup=warmups,
            mode=mode,
            concurrency=cap,
            duration=duration,
            sha256=schedule_hash(requests, mode, cap, duration),
            description=f"{self.description}; {arrival.description}"
            + (f", at most {cap} in flight (semi-open)" if mode == "semi-open" else "")
            + f"; seed {seed}",
            seed=seed,
        )

    def _check_size(self, num_requests: int) -> None:
        total = sum(cls.weight for cls in self.classes)
        tokens = num_requests * sum(cls.weight * cls.prompt.mean for cls in self.classes) / total
        if tokens > MAX_PROMPT_TOKENS:
            raise WorkloadError(
                f"{num_requests:,} requests have some {tokens:,.0f} prompt tokens, more than the "
                f"{MAX_PROMPT_TOKENS:,} that are planned at once; ask for fewer requests or a shorter run"
            )

    def _enough(self, concurrency: int, duration: float) -> int:
        """Requests that a closed loop cannot use up in ``duration`` s, within reason.

        A run that uses them up all the same ends early and says so.
        """
        total = sum(cls.weight for cls in self.classes)
        output, prompt = (
            sum(cls.weight * getattr(cls, name).mean for cls in self.classes) / total
            for name in ("output", "prompt")
        )
        slot = max(1.0, duration * _FASTEST_STREAM / output)
        return math.ceil(min(concurrency * slot, max(2.0 * concurrency, _MOST_PROMPT_TOKENS / prompt)))


class PromptSource:
    """Draws prompts whose first tokens are all different while the vocabulary lasts.

    Ids near both ends of the vocabulary are left out: special tokens live there.
    """

    def __init__(self, vocab_size: int, rng: np.random.Generator) -> None:
        margin = min(256, vocab_size // 4)
        self._low, self._high = margin, vocab_size - margin
        self._rng = rng
        self._firsts: list[int] = []
        self._prefixes: dict[tuple[str, int], tuple[int, ...]] = {}

    def tokens(self, count: int) -> tuple[int, ...]:
        if not self._firsts:
            self._firsts = (self._rng.permutation(self._high - self._low) + self._low).tolist()
        rest = self._rng.integers(self._low, self._high, size=count - 1)
        return (self._firsts.pop(), *rest.tolist())

    def prompt(self, cls: RequestClass, length: int, group: int) -> tuple[int, ...]:
        if not cls.shared_prefix:
            return self.tokens(length)
        key = (cls.name, group)
        if key not in self._prefixes:
            self._prefixes[key] = self.tokens(cls.shared_prefix)
        return self._prefixes[key] + self.tokens(length - cls.shared_prefix)


_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place",
    "case", "week", "company", "system", "program", "question", "work", "number", "night", "point",
    "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "lot", "right",
    "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house",
    "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law", "car",
    "city",
)  # fmt: skip


def _chatting(request: PlannedRequest) -> PlannedRequest:
    if request.prompt_token_ids is None:
        return request
    text = " ".join(_WORDS[token % len(_WORDS)] for token in request.prompt_token_ids)
    return replace(request, prompt_token_ids=None, messages=(Message("user", text),))


def schedule_hash(
    requests: Sequence[PlannedRequest], mode: Mode, concurrency: int | None, duration: float | None
) -> str:
    """SHA-256 over everything that decides what is sent and when, but for priorities and salts; the same on
    every machine."""
    digest = hashlib.sha256(f"vtune.schedule/1|{mode}|{concurrency}|{duration!r}".encode())
    for r in requests:
        head = (r.index, r.cls, r.intended.hex(), r.max_tokens, r.ignore_eos, r.temperature, 0)
        digest.update(repr(head).encode())
        if r.prompt_token_ids is not None:
            digest.update(np.asarray(r.prompt_token_ids, dtype="<i8").tobytes())
        if r.prompt is not None:
            digest.update(r.prompt.encode())
        more = (r.sampling, r.messages, r.follows, r.think.hex())
        if more != ((), None, None, (0.0).hex()):
            digest.update(repr(more).encode())
    return digest.hexdigest()


def mode_of(arrival: Arrival, max_concurrency: int | None) -> tuple[Mode, int | None]:
    """(mode, requests in flight at most). Raises WorkloadError."""
    if arrival.concurrency is not None:
        return "closed", arrival.concurrency
    if max_concurrency is None:
        return "open", None
    if max_concurrency < 1:
        raise WorkloadError(f"max concurrency {max_concurrency}: it must be at least 1")
    return "semi-open", max_concurrency


def _deal(classes: Sequence[RequestClass], count: int, rng: np.random.Generator) -> list[RequestClass]:
    """Classes in random order, from shuffled decks that hold each class in exactly its share.

    Independent draws would give a run of 50 requests anything between no and six requests of a 5 %
    class, and the difference between two seeds would drown the difference between two servers.
    """
    total = sum(cls.weight for cls in classes)
    exact = np.array([cls.weight / total for cls in classes])
    dealt: list[RequestClass] = []
    owed = np.zeros(len(classes))
    while len(dealt) < count:
        owed += exact * _DECK
        whole = np.floor(owed + 1e-9).astype(int)
        while whole.sum() < _DECK:
            whole[int(np.argmax(owed - whole))] += 1
        owed -= whole
        deck = [cls for cls, copies in zip(classes, whole, strict=True) for _ in range(copies)]
        dealt.extend(deck[int(i)] for i in rng.permutation(len(deck)))
    return dealt[:count]


def _plan(
    index: int,
    cls: RequestClass,
    intended: float,
    prompts: PromptSource,
    rng: np.random.Generator,
    temperature: float,
) -> PlannedRequest:
    group = int(rng.integers(cls.prefix_groups))
    return PlannedRequest(
        index=index,
        cls=cls.name,
        intended=intended,
        prompt_token_ids=prompts.prompt(cls, cls.prompt.draw(rng), group),
        prompt=None,
        max_tokens=cls.output.draw(rng),
        temperature=temperature,
        priority=cls.priority,
    )


def warm(request: PlannedRequest) -> PlannedRequest:
    """A warm-up needs the whole prompt (shapes, memory) but only a few steps of decoding."""
    return replace(request, max_tokens=min(request.max_tokens, 16))


def preset(
    name: str,
    *,
    max_model_len: int,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    input_len: int | None = None,
    output_len: int | None = None,
    scale: float | None = None,
) -> Workload:
    """A workload by name. Prompt lengths are written for a context of 32,768 tokens and multiplied by
    ``scale`` (None: min(1, max_model_len / 32768)); outputs stay, but never exceed an eighth of the
    context. ``input_len``/``output_len`` fix both lengths of a workload with one class.

    ``mixed`` is 80 % short questions (100 in, 50 out), 15 % RAG (8,000 in, 200 out) and 5 % background
    (20,000 in, 100 out). Raises WorkloadError.
    """
    if name not in PRESETS:
        raise WorkloadError(f"unknown workload {name!r}; known: {', '.join(PRESETS)}")
    if max_model_len < 4 * _MIN_PROMPT:
        raise WorkloadError(f"a context of {max_model_len} tokens is too short for a workload")
    factor = min(1.0, max_model_len / REFERENCE_CONTEXT) if scale is None else scale
    if not factor > 0:
        raise WorkloadError(f"scale {factor}: it must be positive")
    note = f"prompts scaled x{factor:.3g} (context {max_model_len})"
    if name == "random":
        classes: tuple[RequestClass, ...] = (
            RequestClass("random", 1, Length(input_len or 256), Length(output_len or 64)),
        )
        note = ""
    else:
        longest = max(1, max_model_len // 8)
        classes = tuple(_scaled(cls, factor, longest) for cls in _REFERENCE[name])
        if input_len is not None or output_len is not None:
            classes, note = _fixed(name, classes, input_len, output_len), ""
    check_fit(name, classes, max_model_len)
    return Workload(name, classes, vocab_size, note)


_REFERENCE: dict[str, tuple[RequestClass, ...]] = {
    "chat": (RequestClass("chat", 1, Length(1000, 0.5), Length(128, 0.5)),),
    "rag": (RequestClass("rag", 1, Length(8000, 0.2), Length(200, 0.2)),),
    "batch": (RequestClass("batch", 1, Length(2000, 0.5), Length(400, 0.5)),),
    "mixed": (
        RequestClass("short", 80, Length(100, 0.2), Length(50, 0.2), priority=0),
        RequestClass("rag", 15, Length(8000, 0.2), Length(200, 0.2), priority=1),
        RequestClass("background", 5, Length(20000, 0.2), Length(100, 0.2), priority=2),
    ),
    "shared-prefix": (
        RequestClass("shared-prefix", 1, Length(2400), Length(64), shared_prefix=2000, prefix_groups=1),
    ),
}


def _scaled(cls: RequestClass, factor: float, longest_output: int) -> RequestClass:
    prompt = cls.prompt.scaled(factor, _MIN_PROMPT)
    output = cls.output if cls.output.high <= longest_output else Length(longest_output)
    prefix = min(round(cls.shared_prefix * factor), prompt.low - 1)
    return replace(cls, prompt=prompt, output=output, shared_prefix=prefix)


def _fixed(
    name: str, classes: tuple[RequestClass, ...], input_len: int | None, output_len: int | None
) -> tuple[RequestClass, ...]:
    if len(classes) > 1:
        raise WorkloadError(
            f"workload {name} has several classes: input and output length cannot be set; "
            "use random, or a workload with one class"
        )
    cls = classes[0]
    prompt = cls.prompt if input_len is None else Length(input_len)
    output = cls.output if output_len is None else Length(output_len)
    prefix = cls.shared_prefix * prompt.mean // cls.prompt.mean
    return (replace(cls, prompt=prompt, output=output, shared_prefix=prefix),)


def check_fit(name: str, classes: Sequence[RequestClass], max_model_len: int) -> None:
    """Raises WorkloadError where a class's longest request exceeds the context."""
    for cls in classes:
        longest = cls.prompt.high + cls.output.high
        if longest > max_model_len:
            factor = math.floor(100 * max_model_len / longest) / 100
            raise WorkloadError(
                f"workload {name}, class {cls.name}: {cls.prompt.high} prompt + {cls.output.high} output "
                f"tokens exceed the context of {max_model_len}; shorten them to x{factor:g} or less"
            )
