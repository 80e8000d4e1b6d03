"""What the wheels of released servers say, and what is concluded from it."""

import pytest

from servers.facts import releases_of, version_of
from servers.kinds import LMDEPLOY, SGLANG, VLLM
from servers.metrics.catalog import METRICS, names_of, never_had

VLLM_FACTS, SGLANG_FACTS = releases_of("vllm"), releases_of("sglang")
assert VLLM_FACTS is not None
assert SGLANG_FACTS is not None


def test_every_release_is_there_in_order() -> None:
    for facts, least in ((VLLM_FACTS, 25), (SGLANG_FACTS, 10)):
        assert len(facts.releases) >= least
        assert list(facts.versions) == sorted(facts.versions)
    assert releases_of("lmdeploy") is None


@pytest.mark.parametrize(
    ("version", "nearest"),
    [
        ("0.18.1", (0, 18, 1)),
        ("0.32.0+cpu", (0, 32, 0)),
        ("0.9.99", (0, 9, 2)),
        ("99.0", None),
        ("0.1", (0, 6, 0)),
        ("0.1.dev9876+gdeadbee.cu128", None),
        ("0.10.2rc3.dev5", (0, 10, 2)),
    ],
)
def test_a_version_between_releases_is_the_one_before(version: str, nearest: tuple[int, ...] | None) -> None:
    assert VLLM_FACTS.nearest(version) == (nearest or VLLM_FACTS.versions[-1])
    assert version_of("0.32.0+cpu") == (0, 32, 0)


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("vllm:request_num_preemptions", "0.30.0", None),
        ("vllm:request_prefill_kv_computed_tokens", "0.13.0", None),
        ("vllm:time_in_queue_requests", None, "0.9.0.1"),
        ("vllm:kv_cache_usage_perc", "0.9.2", None),
        ("vllm:admission_rejections", "0.32.0", None),
    ],
)
def test_metrics_come_and_go_with_releases(name: str, first: str | None, last: str | None) -> None:
    """Held against the wheels by hand."""
    spans = VLLM_FACTS.metrics[name]
    assert first is None or spans[0][0] == first
    assert spans[-1][1] == last


def test_a_hidden_metric_is_none() -> None:
    hidden = VLLM_FACTS.metrics_at("0.14.1").get("vllm:time_per_output_token_seconds")
    assert hidden is not None
    assert hidden.hidden
    name = "vllm:time_per_output_token_seconds_count"
    assert name in names_of("0.10.2")
    assert name not in names_of("0.14.1")


@pytest.mark.parametrize(
    ("version", "name", "kind"),
    [
        ("0.33.0", "max_num_seqs", "int"),
        ("0.33.0", "max_model_len", "size"),
        ("0.33.0", "enforce_eager", "switch"),
        ("0.33.0", "speculative_config", "json"),
        ("0.33.0", "served_model_name", "many"),
        ("0.10.2", "kv_cache_dtype", "text"),
        ("0.6.6", "gpu_memory_utilization", "float"),
    ],
)
def test_flags_have_the_kind_that_their_server_gives_them(version: str, name: str, kind: str) -> None:
    flag = VLLM_FACTS.flag(name, version)
    assert flag is not None
    assert flag.kind == kind
    assert flag.options[0] == "--" + name.replace("_", "-")


def test_defaults_follow_the_release() -> None:
    def memory(version: str) -> object:
        flag = VLLM_FACTS.flag("gpu_memory_utilization", version)
        return flag and flag.default

    assert (memory("0.18.1"), memory("0.33.0")) == (0.9, 0.92)
    graphs = [SGLANG_FACTS.flag("cuda_graph_max_bs", v) is not None for v in ("0.5.9", "0.5.23")]
    assert graphs == [True, False]
    assert SGLANG_FACTS.flag("cuda_graph_max_bs_decode", "0.5.23") is not None


@pytest.mark.parametrize("kind", [VLLM, SGLANG], ids=lambda kind: kind.name)
def test_every_metric_that_is_read_existed_in_some_release(kind: object) -> None:
    facts = releases_of(kind.name)  # type: ignore[attr-defined]
    for key, names in kind.metrics.items():  # type: ignore[attr-defined]
        plain = [n.removesuffix("_total") if METRICS[key].kind == "counter" else n for n in names]
        assert any(name in facts.metrics for name in plain), f"{key}: {names} stand in no wheel"


NEVER_OF_VLLM = {"accept_length", "kv_tokens", "waiting_for_grammar"}
"""What other kinds of servers have."""


def test_what_a_known_version_never_had() -> None:
    assert "request_preemptions" in never_had(VLLM, "0.28.0", ())
    assert "request_preemptions" not in never_had(VLLM, "0.30.0", ())
    assert never_had(VLLM, "0.33.0", ()) == {"cache_hit_rate", *NEVER_OF_VLLM}
    assert never_had(LMDEPLOY, None, ()) >= {"preemptions"}


def test_a_version_is_told_by_what_a_page_has_and_lacks() -> None:
    """Without a log the names alone say which releases a page can be of."""
    old = names_of("0.18.1")
    assert "request_preemptions" in never_had(VLLM, None, old)
    new = names_of("0.33.0")
    assert "request_preemptions" not in never_had(VLLM, None, new)
    cut = {name for name in new if "request_num_preemptions" not in name and "queue_time" not in name}
    assert never_had(VLLM, None, cut) == NEVER_OF_VLLM, "no release lacks both: something is missing"
