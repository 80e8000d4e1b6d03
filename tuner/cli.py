"""``vtune optimize``. Light: heavy imports sit inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadgen.commands.options import OptionError, with_options
from tuner.job.options import Replay

MAX_SEED = (1 << 31) - 1
"""The sampler adds to it, and numpy takes 32 bits."""


def mount(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command(no_args_is_help=False)(with_options(optimize))


def optimize(
    *,
    slo: Annotated[
        str | None,
        typer.Option(
            help="itl, stall, ttft, throughput, or bounds: 'itl_p99<50ms,ttft_p95{class=short}<300ms'. [itl]"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="bundled, a directory, a .gguf file or a hub id. [bundled]")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="bundled, vllm, sglang, or a command with {flags} (and {port}) in it; the URL of a server "
            "that runs, to measure and diagnose it as it is; simulated:h100 or another device. [bundled]"
        ),
    ] = None,
    flags: Annotated[
        str | None,
        typer.Option(
            help="Your current command or flags: the baseline, e.g. 'VAR=x vllm serve M --max-num-seqs 64'. "
            "Of a command of the target's kind the program and its environment are used, too."
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="chat, rag, batch, mixed, random or shared-prefix, or a JSON file of classes. [mixed]"
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            help="Factor on prompt lengths. [so that the longest fits the context and prefills in 2 s]"
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Offered requests/s (Poisson). [70 % of the capacity, found first]"),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="A closed loop with so many requests in flight instead of a rate."),
    ] = None,
    traffic: Replay,
    loads: Annotated[
        str | None,
        typer.Option(
            help="Compare configs at these levels of load too, and say where the best one changes: 2,8,16 "
            "(requests/s; with --concurrency requests in flight), auto: a replayed trace's, none. [auto]"
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Time for everything, confirmation included, e.g. 10m; simulated time with a simulated "
            "target. [10m; simulated: 30m]"
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(min=1, help="So many trials beside the baseline, instead of a budget or within it."),
    ] = None,
    run_time: Annotated[
        str | None,
        typer.Option(
            help="Length of one load, e.g. 20s or 2m. [20s, or as long as the server takes to start]"
        ),
    ] = None,
    pairs: Annotated[
        int | None, typer.Option(min=2, help="Pairs of runs of the confirmation. [3 to 16, by budget]")
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(help="Leave this flag as it is; 'all' leaves all but --vary. Repeatable."),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="Search this flag too: FLAG, or FLAG=A,B with its values. Repeatable."),
    ] = None,
    space: Annotated[
        Path | None,
        typer.Option(help="YAML or JSON: the flags to search with their values, and constraints on them."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=MAX_SEED, help="Of the load and of the search. [0]")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Who decides what to try: gp (auto), tpe, random, or staircase, a knob at a time. [auto]"
        ),
    ] = None,
    prior: Annotated[
        str | None,
        typer.Option(
            help="What simulates configs before they are measured: auto (the bundled engine's own, for other "
            "servers a sketch), sketch (step times that explain what your config measured), none, "
            "simulated:h100 or another device, or a JSON file of step times. [auto]"
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Start from what an earlier study recommended, and say whether the optimum moved (then the "
            "exit code is 1): its --out directory, its report.json, its name, or STORAGE-URL#STUDY."
        ),
    ] = None,
    from_doctor: Annotated[
        Path | None,
        typer.Option(
            help="A diagnosis ('vtune doctor … --format json') whose prescriptions are tried first. [that of "
            "your config's own trial]"
        ),
    ] = None,
    study: Annotated[
        str | None,
        typer.Option(
            help="The study's name. Given alone, or with the --out or --storage it was begun with, it goes "
            "on. [made from the time]"
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            envvar="VTUNE_STORAGE",
            help="Database that workers on any machines share, e.g. postgresql+psycopg://USER@HOST/DB; each "
            "of them is this same command with the same --study. [sqlite:///OUT/study.db, for this process]",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="So many workers on this machine, each with its share of its GPUs. [1]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for report, records and logs. [vtune-runs/STUDY]")
    ] = None,
    start_timeout: Annotated[
        str, typer.Option(help="How long a server may take until it is healthy.")
    ] = "10m",
    json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON on stdout.")] = False,
) -> None:
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
    from tuner.command import Options, run
    from tuner.study.budget import parse_seconds

    times = {}
    for option, text in (("--budget", budget), ("--run-time", run_time), ("--start-timeout", start_timeout)):
        try:
            times[option] = None if text is None else parse_seconds(text)
        except ValueError as error:
            typer.echo(f"error: {option}: {error}", err=True)
            raise typer.Exit(2) from None
    try:
        replay = traffic.to_json()
    except OptionError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    options = Options(
        slo=slo,
        model=model,
        target=target,
        flags=flags,
        workload=workload,
        scale=scale,
        rate=rate,
        concurrency=concurrency,
        budget=times["--budget"],
        trials=trials,
        run_seconds=times["--run-time"],
        pairs=pairs,
        fix=None if not fix else tuple(name.lstrip("-").replace("-", "_") for name in fix),
        vary=tuple(vary) if vary else None,
        space=space,
        seed=seed,
        strategy=strategy,
        prior=prior,
        from_doctor=from_doctor,
        replay=replay,
        baseline=baseline,
        loads=loads,
        study=study,
        storage=storage,
        workers=workers,
        out=out,
        start_timeout=times["--start-timeout"] or 600.0,
        as_json=json,
    )
    raise typer.Exit(run(options))
