"""``vtune optimize``. Light: heavy imports sit inside the command."""

from __future__ import annotations

import typer

from loadgen.commands.options import with_options
from tuner.job.options import Options


def mount(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command(no_args_is_help=False)(with_options(optimize))


def optimize(options: Options) -> None:
    """Find server flags that meet an SLO, and prove on fresh runs that they do.

    Measures your config, plans the budget, searches, confirms the best config against yours, and writes a
    report. Ctrl-C stops cleanly; --study NAME goes on. Exit: 0 done, also when nothing beats your config; 1
    no config holds the SLO, or with --baseline: the optimum moved; 2 usage; 130 interrupted.

    Examples:

      vtune optimize --slo itl --workload mixed --budget 10m

      vtune optimize --slo 'itl_p99<80ms,ttft_p95{class=short}<500ms' --flags 'vtune serve bundled
      --max-num-seqs 64'

      vtune optimize --target vllm --model Qwen/Qwen3-8B --slo throughput --trials 20

      vtune optimize --target 'my-server {flags} --port {port}' --fix gpu_memory_utilization --vary
      block_size=16,32

      vtune optimize --target simulated:h100 --model config.json --slo 'itl_p99<40ms,ttft_p95<400ms'

      vtune optimize --replay monday.jsonl --slo 'itl_p99<80ms' --run-time 60s --budget 30m

      vtune optimize --baseline vtune-runs/optimize-20260101-120000 --replay today.jsonl

      vtune optimize --study optimize-20260101-120000
    """
    from tuner.command import run

    raise typer.Exit(run(options))
