"""The bundled engine with a sequence cap, under real load: found by Prometheus and by our own scrapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from live_prometheus import await_first_scrape, needs_prometheus, prometheus

from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.metrics.sources import PrometheusSource, Scrapes
from loadgen.plan.arrivals import ClosedLoop
from loadgen.plan.load_policy import Progress
from loadgen.plan.workload import preset
from loadgen.targets.server import ServerTarget

pytest.importorskip("torch", reason="the bundled engine needs the engine extra")

VOCABULARY, CONTEXT = 4096, 1024


def tiny_model(directory: Path) -> Path:
    """The shape of a model whose steps take a millisecond; its weights are dummies, its words are numbers."""
    from tokenizers import Tokenizer, models

    directory.mkdir()
    words = {str(token): token for token in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="0")).save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def roots(diagnosis: Diagnosis) -> list[str]:
    return [finding.id for finding in diagnosis.findings if finding.suppressed_by is None]


@needs_prometheus
def test_a_real_prometheus_scrapes_the_bundled_engine(tmp_path: Path) -> None:
    workload = preset("random", max_model_len=CONTEXT, vocab_size=VOCABULARY, input_len=32, output_len=800)
    schedule = workload.schedule(seed=1, arrival=ClosedLoop(8), duration=5.0, num_requests=1000)
    found: list[Diagnosis] = []
    target = ServerTarget.bundled(str(tiny_model(tmp_path / "model")), log_dir=tmp_path)

    with target.open({"max_num_seqs": 2, "load_format": "dummy"}) as server:
        host = server.url.removeprefix("http://").rstrip("/")
        with prometheus(tmp_path, [host], interval="500ms") as url:
            await_first_scrape(url, host)

            def look(progress: Progress) -> None:
                if progress.elapsed >= 4 and not found:
                    found.append(diagnose(PrometheusSource(url, 'job="vllm"'), window=3))

            records = server.run(schedule, progress=look)

    (live,) = found
    assert live.engines == (host,)
    assert roots(live) == ["seq-cap"]
    assert live.findings[0].flags["max_num_seqs"].origin == "inferred"

    under_load = records.scrapes[1:-1]
    recorded = diagnose(Scrapes(under_load, "bundled"), {"max_num_seqs": 2})
    assert roots(recorded) == ["seq-cap"]
    (cure,) = recorded.findings[0].prescriptions
    assert cure.was == {"max_num_seqs": 2}
    assert cure.changes["max_num_seqs"] in (7, 8)
