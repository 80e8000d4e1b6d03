"""The quick text of the metrics is that of prometheus_client."""

from __future__ import annotations

import re

from engine.metrics.exposition import Exposition
from engine.metrics.prometheus import PrometheusMetrics
from engine.metrics.stats import FinishedStats, StepStats

ABSENT = re.compile(r"(# (HELP|TYPE) )?(process_\w+|[\w:]+_created)[ {]")
FINISHED = FinishedStats(
    "r", "length", e2e=2.5, queue=0.25, prefill=0.125, decode=2.0, inference=2.2, time_per_output_token=0.04,
    prompt_tokens=1_234_567, generation_tokens=51, cached_tokens=16, preemptions=1, max_tokens=51,
)  # fmt: skip


def test_it_is_the_same_text_however_often_it_is_asked_for() -> None:
    metrics = PrometheusMetrics(
        'm "quoted"', max_model_len=4096, num_speculative_tokens=2, cache_info={"block_size": 16}
    )
    quick = Exposition(metrics.families)
    for step in range(3):
        lines = metrics.render().decode().splitlines(keepends=True)
        assert quick.render() == "".join(line for line in lines if not ABSENT.match(line))
        metrics.record(
            StepStats(
                num_running=step,
                kv_usage=0.1 * step,
                prompt_tokens=10_000_000,
                generation_tokens=4,
                had_output=True,
                first_token_latencies=(0.3,),
                inter_token_latencies=((0.02, 3), (0.5, 1)),
                finished=(FINISHED,) * step,
                num_drafts=1,
                num_draft_tokens=2,
                num_accepted_tokens=1,
                accepted_per_position=(1, 0),
            )
        )
    assert 'vllm:generation_tokens_total{engine="0",model_name="m \\"quoted\\""} 12.0\n' in quick.render()
