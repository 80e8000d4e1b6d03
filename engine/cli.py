"""``vtune serve`` and ``vtune explain``. Light: torch and friends are imported inside the commands."""

from __future__ import annotations

import enum
import json
import sys
from typing import Annotated

import typer

from engine.server.serve_arguments import ServeCommand, normalize
from engine.server.serve_command import HELP as SERVE_HELP
from engine.server.serve_command import serve

EXPLAIN_HELP = """Show what the scheduler decides, step by step, with no model.

The table shows how the token budget of each step was cut: how many tokens each request got, what was left, \
which requests wait and why, blocks in use, preemptions and prefix hits. Every sampled token is 0; with \
num_speculative_tokens, drafts and their acceptance follow a fixed rule.

Examples:

  vtune explain --config config.json --requests requests.json

  vtune explain --config config.yaml --requests - --format jsonl < requests.json
"""


class ExplainFormat(enum.StrEnum):
    table = "table"
    jsonl = "jsonl"


def explain(
    config: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="JSON or YAML object: max_model_len and num_gpu_blocks (null block included), and as far as "
            "they differ from the defaults block_size, max_num_seqs, max_num_batched_tokens, "
            "enable_chunked_prefill, enable_prefix_caching, scheduling_policy, "
            "long_prefill_token_threshold, num_speculative_tokens, enable_lora, max_loras, scheduler, "
            "preemption_mode, num_host_blocks. - is standard input.",
        ),
    ],
    requests: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="JSON or YAML list of objects: id, prompt_token_ids, output_len, and as far as they differ "
            "from 0 arrival_step and priority, and lora_name. - is standard input.",
        ),
    ],
    format: Annotated[
        ExplainFormat, typer.Option(help="A table for people, or one JSON object per step.")
    ] = ExplainFormat.table,
) -> None:
    """Run the scheduler on the requests and print its steps. See EXPLAIN_HELP. Raises ExplainError."""
    from engine.explain.explain import explain_steps
    from engine.explain.explain_input import ExplainError, load, read_config, read_requests

    if config == requests == "-":
        raise ExplainError("--config and --requests cannot both be standard input")
    setup = read_config(load(config))
    arrivals = read_requests(load(requests), setup)
    for warning in setup.warnings:
        typer.echo(f"warning: {warning}", err=True)
    steps = explain_steps(setup, arrivals)
    if format is ExplainFormat.jsonl:
        for step in steps:
            typer.echo(json.dumps(step.row(setup.speculative)))
    else:
        from engine.explain.explain_table import print_steps

        print_steps(setup, steps, sys.stdout)


def mount(app: typer.Typer) -> None:
    """Add the engine's commands to ``app``."""
    app.command(help=EXPLAIN_HELP)(explain)
    app.command(
        help=SERVE_HELP,
        cls=ServeCommand,
        context_settings={"ignore_unknown_options": True, "token_normalize_func": normalize},
    )(serve)
