"""What drafts are worth: the formula against the engine, and each method by batch size, on two kinds of text.

    python -m benchmarks.engine.speculation [--quick] [--eagle DIR] [--draft-model DIR] [--json FILE]

1. The formula. A proposer that knows the text is right with probability a for each draft, and waits c times a
   plain step for each: tokens per step against E = (1 - a^(k+1)) / (1 - a), and speed against E / (1 + c k).
   The formula holds verification to be free; what a step with k drafts really costs is printed beside it.
2. Methods. Tokens a second with and without, alternating in one run, at each batch size, for text that
   repeats what it has been given (greedy) and for free text (temperature 1). ``pays to`` is the batch size at
   which the ratio, interpolated between those that were measured, falls below 1.

``--eagle`` takes a head of ``python -m engine.training.train_eagle``. Without ``--draft-model`` the served
model drafts for itself, which shows the machinery (every draft holds) and can never pay. Leave the machine
alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.llm import LLM
from engine.models.model import Decoder
from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.spec.proposer import Proposer, TargetStep
from engine.speculative_config import SpeculativeConfig
from engine.step import StepOutput, StepPlan

FLAGS: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 768}
CASES = ((0.7, 3, 0.0), (0.75, 4, 0.1), (0.6, 5, 0.3))
"""Acceptance a, drafts k, cost c of a draft in steps of the target."""
SUBJECTS = (
    "a lighthouse keeper",
    "the first train",
    "an old violin",
    "rain in the desert",
    "two chess players",
    "a lost letter",
    "a baker and his cat",
    "a map without names",
)
PASSAGE = (
    "The harbour opens at {hour} in the morning. Ships of the {colour} line load {cargo}, to leave by noon. "
    "The harbour master writes the name of every ship, its cargo and its port into a long book, and at night "
    "the book is carried to the town hall, where a clerk copies the names into another book."
)


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens of a step: the drafts up to the first that is wrong, and one more (arXiv:2211.17192, eq. 1)."""
    return (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


@dataclass
class Run:
    """What the steps of one ``generate`` took and gave; steps with prefill are left out."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: Counter[int] = field(default_factory=Counter)
    _last: float = field(default_factory=time.perf_counter)

    def __call__(self, plan: StepPlan, output: StepOutput) -> None:
        now = time.perf_counter()
        if all(item.emits and item.num_tokens <= 1 + len(item.drafts) for item in plan.scheduled):
            self.seconds.append(now - self._last)
            self.tokens += sum(len(item.token_ids) for item in output.outputs)
            self.drafts += output.num_drafts
            self.drafted += output.num_draft_tokens
            self.accepted += output.num_accepted_tokens
            self.by_position.update(dict(enumerate(output.accepted_per_position)))
        self._last = now

    @property
    def speed(self) -> float:
        """Output tokens per second."""
        return self.tokens / sum(self.seconds)

    @property
    def acceptance(self) -> float:
        return self.accepted / max(self.drafted, 1)

    @property
    def tokens_a_step(self) -> float:
        return 1 + self.accepted / max(self.drafts, 1)


def run(llm: LLM, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> Run:
    measured = Run()
    llm.generate(prompts, sampling, observe=measured)
    return measured


# ---------------------------------------------------------------- 1. the formula


class Oracle(Proposer):
    """Knows how each prompt goes on. Each draft is right with probability ``acceptance``."""

    def __init__(self, drafts: int) -> None:
        self.drafts, self.acceptance, self.seconds_a_draft = drafts, 0.0, 0.0
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self._random = random.Random(0)

    def propose(self, step: TargetStep) -> dict[str, list[int]]:
        proposed = {}
        for request, emitted in step.emitting():
            done = request.num_output_tokens + len(emitted)
            truth = self.answers.get(tuple(request.prompt_token_ids), [])[done : done + self.drafts]
            proposed[request.request_id] = [
                token if self._random.random() < self.acceptance else token ^ 1 for token in truth
            ]
        time.sleep(self.seconds_a_draft * self.drafts)
        return proposed


def formula(tokens: int, rounds: int) -> list[dict[str, float]]:
    """Each of CASES at batch size 1, beside what the formula says."""
    oracles: list[Oracle] = []

    def know(config: EngineConfig, target: Decoder) -> Proposer:
        oracles.append(Oracle(config.num_speculative_tokens))
        return oracles[-1]

    rows = []
    plain = LLM("bundled", **FLAGS)
    opening = "Once upon a time there was"
    prompts = [plain.tokenizer.encode(f"{opening} {subject}") for subject in SUBJECTS[:rounds]]
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for acceptance, drafts, cost in CASES:
        speculative = {"method": "ngram", "num_speculative_tokens": drafts}  # its scheduling; Oracle proposes
        flags = {**FLAGS, "speculative_config": SpeculativeConfig.parse(speculative)}
        drafting = LLM("bundled", runner=ModelRunner(EngineConfig("bundled", **flags), know), **flags)
        oracle = oracles[-1]
        longer = SamplingParams(temperature=0.0, max_tokens=tokens + drafts, ignore_eos=True)
        for answer in plain.generate(prompts, longer):
            oracle.answers[tuple(answer.prompt_token_ids)] = answer.token_ids
        oracle.acceptance = acceptance
        pairs = []
        for prompt in prompts:
            without = run(plain, [prompt], [sampling])
            oracle.seconds_a_draft = cost * statistics.median(without.seconds)
            pairs.append((without, run(drafting, [prompt], [sampling])))
        step = statistics.median(value for without, _ in pairs for value in without.seconds)
        verified = statistics.median(value for _, with_ in pairs for value in with_.seconds)
        emitted = sum(w.accepted + w.drafts for _, w in pairs) / sum(w.drafts for _, w in pairs)
        rows.append(
            {
                "a": acceptance,
                "k": drafts,
                "c": cost,
                "tokens_formula": expected_tokens(acceptance, drafts),
                "tokens_measured": emitted,
                "speedup_formula": expected_tokens(acceptance, drafts) / (1 + cost * drafts),
                "speedup_measured": statistics.median(w.speed / without.speed for without, w in pairs),
                "speedup_with_step": emitted / (verified / step),
                "step_cost": verified / step - cost * drafts,
            }
        )
    return rows


# ---------------------------------------------------------------- 2. the methods


@dataclass(frozen=True)
class Text:
    """A kind of text: prompts, and how they are answered."""

    name: str
    prompt: Callable[[int], str]
    temperature: float


def _passage(number: int) -> str:
    words = {"hour": 3 + number % 7, "colour": COLOURS[number % 5], "cargo": CARGOES[number % 4]}
    text = PASSAGE.format(**words) + f" This is page {number}."
    return f"{text}\n\nThe same text once more, word for word:\n\n{text}\n\nAnd once more:\n\n"


COLOURS, CARGOES = ("red", "blue", "white", "green", "black"), ("salt", "timber", "iron", "paper")
TEXTS = (
    Text("repeats", _passage, 0.0),
    Text("free", lambda number: f"Diary, day {number}. Something unexpected happened today:", 1.0),
)


def methods(eagle: Path | None, draft_model: str) -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = {
        "n-gram k=3": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        "suffix": {"method": "suffix", "num_speculative_tokens": 12},
        "draft model k=3": {"method": "draft_model", "model": draft_model},
    }
    if eagle is not None:
        known["EAGLE k=3"] = {"method": "eagle", "model": str(eagle)}
    return known


@dataclass(frozen=True)
class Cell:
    method: str
    text: str
    batch: int
    ratio: float
    """Tokens a second with drafts by those without."""
    acceptance: float
    tokens_a_step: float
    by_position: tuple[float, ...]
    plain: float
    """Tokens a second without drafts."""


def cells(
    known: dict[str, dict[str, Any]], batches: Sequence[int], tokens: int, rounds: int
) -> Iterator[Cell]:
    plain = LLM("bundled", **FLAGS)
    for name, speculative in known.items():
        drafting = LLM("bundled", speculative_config=speculative, **FLAGS)
        for text in TEXTS:
            for batch in batches:
                yield cell(name, plain, drafting, text, batch, tokens, rounds)


def cell(name: str, plain: LLM, drafting: LLM, text: Text, batch: int, tokens: int, rounds: int) -> Cell:
    prompts = [plain.tokenizer.encode(text.prompt(1000 * batch + number)) for number in range(batch)]
    sampling = [
        SamplingParams(max_tokens=tokens, temperature=text.temperature, seed=number, ignore_eos=True)
        for number in range(batch)
    ]
    short = [SamplingParams(max_tokens=1)] * batch
    for llm in (plain, drafting):
        llm.generate(prompts, short)  # so that their prefixes are cached
    with_: list[Run] = []
    without: list[Run] = []
    for number in range(rounds):
        for llm, found in ((plain, without), (drafting, with_))[:: 1 if number % 2 == 0 else -1]:
            found.append(run(llm, prompts, sampling))
    drafts = max(sum(r.drafts for r in with_), 1)
    total: Counter[int] = sum((r.by_position for r in with_), Counter())
    return Cell(
        name,
        text.name,
        batch,
        statistics.median(w.speed / p.speed for w, p in zip(with_, without, strict=True)),
        statistics.mean(r.acceptance for r in with_),
        statistics.mean(r.tokens_a_step for r in with_),
        tuple(total[place] / drafts for place in range(max(total, default=-1) + 1)),
        statistics.median(r.speed for r in without),
    )


def pays_to(row: Sequence[Cell]) -> str:
    """The batch size at which the ratio falls below 1, interpolated on a logarithmic scale."""
    if row[0].ratio < 1:
        return "never"
    for before, after in pairwise(row):
        if after.ratio < 1:
            share = (before.ratio - 1) / (before.ratio - after.ratio)
            return f"{before.batch * (after.batch / before.batch) ** share:.0f}"
    return f"> {row[-1].batch}"


# ---------------------------------------------------------------- tables


def print_formula(rows: Sequence[dict[str, float]]) -> None:
    print("  a    k    c   E formula  measured   speed-up formula  measured   step   E/(step+ck)")
    for row in rows:
        print(
            f"{row['a']:.2f} {row['k']:3.0f} {row['c']:4.1f} {row['tokens_formula']:11.2f} "
            f"{row['tokens_measured']:9.2f} {row['speedup_formula']:18.2f} {row['speedup_measured']:9.2f}   "
            f"x{row['step_cost']:.2f} {row['speedup_with_step']:10.2f}"
        )
    print("step: what a step that verifies k drafts costs, in plain steps, without the drafting itself")


def print_methods(found: Sequence[Cell], batches: Sequence[int]) -> None:
    columns = "".join(f"{f'x at {batch}':>10}" for batch in batches)
    print(f"\n{'':<18}{'text':<9}{'accepted':>9}{'tok/step':>9}{columns}{'pays to':>9}")
    for start in range(0, len(found), len(batches)):
        row = found[start : start + len(batches)]
        accepted = statistics.mean(cell.acceptance for cell in row)
        width = statistics.mean(cell.tokens_a_step for cell in row)
        ratios = "".join(f"{cell.ratio:10.2f}" for cell in row)
        print(f"{row[0].method:<18}{row[0].text:<9}{accepted:9.1%}{width:9.2f}{ratios}{pays_to(row):>9}")
    print("accepted by position, at the smallest batch:")
    for start in range(0, len(found), len(batches)):
        shares = " ".join(f"{share:.0%}" for share in found[start].by_position)
        print(f"  {found[start].method:<18}{found[start].text:<9}{shares}")
    speeds = {cell.batch: cell.plain for cell in found}
    print(
        "tokens/s without drafts: " + ", ".join(f"{speed:.0f} at {batch}" for batch, speed in speeds.items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer tokens, rounds and batch sizes: a minute")
    parser.add_argument("--part", choices=("formula", "methods"), help="one of the two tables")
    parser.add_argument("--eagle", type=Path, help="directory of an EAGLE head for the bundled model")
    parser.add_argument("--draft-model", default="bundled", help="of the bundled model's vocabulary")
    parser.add_argument("--methods", nargs="+", help="only those whose names begin so, e.g. n-gram suffix")
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes (default 1 4 16 64)")
    parser.add_argument("--json", type=Path, help="write every value here")
    options = parser.parse_args()
    batches = options.batches or ([1, 16] if options.quick else [1, 4, 16, 64])
    rows: list[dict[str, float]] = []
    found: list[Cell] = []
    if options.part != "methods":
        rows = formula(tokens=24 if options.quick else 64, rounds=3 if options.quick else len(SUBJECTS))
        print_formula(rows)
    if options.part != "formula":
        known = methods(options.eagle, options.draft_model)
        if options.methods:
            known = {name: keys for name, keys in known.items() if name.startswith(tuple(options.methods))}
        for done in cells(known, batches, 24 if options.quick else 64, 1 if options.quick else 3):
            print(f"  {done.method}, {done.text}, {done.batch}: x{done.ratio:.2f}", flush=True)
            found.append(done)
        print_methods(found, batches)
    if options.json:
        content = {"formula": rows, "methods": [asdict(cell) for cell in found]}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
