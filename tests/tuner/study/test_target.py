"""From ``--target`` and ``--flags`` to a server, and what its program must take."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import optuna
import pytest

from loadgen.targets.endpoint import EndpointTarget
from loadgen.targets.server import ServerTarget
from servers.command import parse_command
from servers.flags.offered_flags import OfferedFlags
from servers.flags.words import FlagError
from servers.slo.objective import parse_slo
from tuner.job.job import Job
from tuner.job.options import Options
from tuner.report.reproduce import command_of
from tuner.runs.findings import TrialFinding
from tuner.runs.interrupts import Interrupts
from tuner.runs.result import Measurement, Reading, TrialResult
from tuner.session.new_job import requested_job
from tuner.space.knobs import KNOBS
from tuner.space.space import SpaceError
from tuner.study.observer import Observer
from tuner.study.optimize import Optimizer
from tuner.study.outcome import as_it_runs
from tuner.study.target import TargetError, check_offered, make_target, started_as
from tuner.study.trial import Bench
from tuner.workers.storage import open_study

FAKE = Path(__file__).parents[2] / "fake_server.py"
VLLM = "A=1 B='x y' numactl -N 0 /opt/bin/vllm serve 'my model' --max-num-seqs 64 --port 80"


def launch(job: Job, **config: object) -> str:
    return make_target(job, Path("out"), 60.0).launch_command({**job.flags, **config})


def test_a_command_of_the_targets_kind_brings_its_program_and_environment() -> None:
    job = requested_job(Options(target="vllm", flags=VLLM)).job
    assert job.flags == {"max_num_seqs": 64}
    assert (job.env, job.model, job.server) == ({"A": "1", "B": "x y"}, "my model", "vllm")
    shown = "A=1 B='x y' numactl -N 0 /opt/bin/vllm serve 'my model' --max-num-seqs 64 --port 8000"
    assert launch(job) == shown
    again = shlex.split(command_of(job))
    assert again[again.index("--flags") + 1] == shown.removesuffix(" --port 8000")
    assert Job.from_json(job.to_json()) == job


@pytest.mark.parametrize(
    ("target", "flags"),
    [
        ("bundled", VLLM),
        ("sglang", VLLM),
        ("vllm", "docker run -p 8000:8000 vllm/vllm-openai --model M --max-num-seqs 64"),
        ("vllm", "--max-num-seqs 64"),
        ("my-server {flags}", VLLM),
    ],
)
def test_of_other_commands_only_the_flags_count(target: str, flags: str) -> None:
    assert started_as(parse_command(flags), target) == {}


def test_the_bundled_engine_takes_the_environment_alone() -> None:
    job = requested_job(
        Options(flags="OMP_NUM_THREADS=1 /elsewhere/vtune serve bundled --max-num-seqs 4"),
    ).job
    assert launch(job) == "OMP_NUM_THREADS=1 vtune serve bundled --max-num-seqs 4 --port 8000"
    assert "--flags 'OMP_NUM_THREADS=1 vtune serve --max-num-seqs 4'" in command_of(job)


def test_sglang_by_name_and_by_command() -> None:
    job = requested_job(Options(target="sglang", model="M", flags="--max-num-seqs 64")).job
    assert launch(job, max_num_batched_tokens=4096, enable_prefix_caching=False) == (
        "python -m sglang.launch_server --model-path M --enable-metrics --max-running-requests 64 "
        "--chunked-prefill-size 4096 --disable-radix-cache --port 8000"
    )
    text = "CUDA_VISIBLE_DEVICES=1 python3 -m sglang.launch_server --model-path M --enable-metrics --tp 2"
    given = requested_job(Options(target="sglang", flags=text)).job
    assert given.flags == {"tensor_parallel_size": 2}
    assert launch(given) == (
        "CUDA_VISIBLE_DEVICES=1 python3 -m sglang.launch_server --model-path M --enable-metrics --tp-size 2 "
        "--port 8000"
    )


class Answering(ServerTarget):
    """A target whose program says what it takes."""

    def __init__(self, *lacks: str) -> None:
        super().__init__("vllm serve M {flags}")
        names = [knob.flag for knob in KNOBS if knob.flag not in lacks] + ["max_model_len", "dtype"]
        self._offered = OfferedFlags("/bin/vllm", "0.32.0", dict.fromkeys(names, ()))

    def offered_flags(self) -> OfferedFlags:
        return self._offered


def check(target: ServerTarget, **options: object) -> list[str]:
    said: list[str] = []
    check_offered(requested_job(Options(target="vllm", **options)).job, target, said.append)  # type: ignore[arg-type]
    return said


def test_flags_that_the_program_lacks_are_refused_before_anything_begins() -> None:
    assert check(Answering(), flags="--dtype bfloat16") == [
        "reading which flags the server takes (once for each version)"
    ]
    with pytest.raises(TargetError, match=r"vllm 0\.32\.0 has no --block-size\. Leave it out"):
        check(Answering("block_size"), flags="--block-size 16")
    with pytest.raises(FlagError, match=r"--max-num-seqz: vLLM has no such flag. Is --max-num-seqs meant\?"):
        check(Answering(), flags="--max-num-seqz 16")
    with pytest.raises(SpaceError, match=r"vllm 0\.32\.0 has no --max-num-partial-prefills"):
        check(Answering("max_num_partial_prefills"), vary=["max_num_partial_prefills"])
    with pytest.raises(SpaceError, match="no such flag"):
        check(Answering(), vary=["made_up=1,2"])


def test_a_server_that_runs_is_measured_and_left_alone(tmp_path: Path) -> None:
    command = shlex.join([sys.executable, "-S", str(FAKE), "m"])
    with ServerTarget(f"{command} {{flags}}", log_dir=tmp_path).open({"max_num_seqs": 4}) as server:
        options = Options(
            target=server.url, flags="--max-num-seqs 4", rate=25.0, workload="random", run_time="1s"
        )
        job = requested_job(options).job
        target = make_target(job, tmp_path, 60.0)
        assert isinstance(target, EndpointTarget)
        bench = Bench(target, Observer(), Interrupts(), tmp_path / "out")
        record = open_study(optuna.storages.InMemoryStorage(), "s", parse_slo(job.slo).objective)
        optimizer = Optimizer(job, bench, record)
        outcome = optimizer.run()
        assert server.scrape()  # it still runs
    assert (outcome.kind, outcome.exit_code) == ("measured", 0)
    assert outcome.ended == "the server runs already and is not restarted"
    assert f"{server.url} was measured as it runs and not restarted: ITL ES99" in outcome.sentence
    assert "The doctor: " in outcome.sentence
    assert optimizer.launched() == 1


def test_what_the_doctor_prescribes_for_it_is_said() -> None:
    measured = Measurement({"itl_es99": Reading(0.05)}, window=10.0)
    findings = (
        TrialFinding("seq-cap", "warning", "Too few sequences", {}, ({"max_num_seqs": 64},)),
        TrialFinding("kv-idle", "info", "An idle pool", {}, ({"max_num_seqs": 128},)),
        TrialFinding("overload", "warning", "Overload", {}, (), suppressed_by="seq-cap"),
    )
    told = TrialResult(0, {}, "baseline", "measured", measurement=measured, findings=findings)
    outcome = as_it_runs(told, "http://h", parse_slo("itl"), "…")
    assert outcome.sentence.endswith(
        "The doctor: Too few sequences (seq-cap). It prescribes: --max-num-seqs 64. To try that, give the "
        "command that starts the server as --target"
    )
    failed = TrialResult(0, {}, "baseline", "failed", reason="hangs")
    assert as_it_runs(failed, "http://h", parse_slo("itl"), "…").exit_code == 1


def test_a_space_file_is_kept_in_the_job(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("knobs: {max_num_seqs: [8, 16]}\nconstraints: [max_num_seqs < 12]")
    job = requested_job(Options(space=path)).job
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    path.unlink()  # a resumed study does not need it any more
    assert job.space == {
        "file": str(path),
        "knobs": {"max_num_seqs": [8, 16]},
        "constraints": ["max_num_seqs < 12"],
    }
    assert f"--space {path}" in command_of(job)
