"""Rules as data: what they compute is what the doctor's language says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.expression import ExpressionError, parse_comparison, parse_expression
from servers.flags.rules import RULES, Rule
from servers.kinds import KINDS
from servers.reading import Missing, Number
from tuner.space.space import build_space, effective

VALUES = {"a": 3.0, "b": 0.5, "c": -2.0}
NAMES = st.sampled_from([*VALUES, "4", "0.25", "7"])
EXPRESSIONS = st.recursive(
    NAMES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda part: f"({' '.join(part)})"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda p: f"{p[0]}({p[1]}, {p[2]})"),
        inner.map(lambda part: f"-{part}"),
    ),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_closures_compute_what_the_doctor_computes(text: str) -> None:
    expression = parse_expression(text)
    theirs = expression.value(lambda name: Number.exactly(VALUES[name]))
    try:
        ours = expression.on_numbers()(VALUES)
    except ZeroDivisionError:
        assert isinstance(theirs, tuple)
        assert isinstance(theirs[0], Missing)
        return
    assert isinstance(theirs, Number)
    assert math.isclose(ours, theirs.point, rel_tol=1e-12, abs_tol=1e-12)


@given(EXPRESSIONS, st.sampled_from([">", ">=", "<", "<=", "=="]), EXPRESSIONS)
def test_a_rule_is_broken_exactly_where_the_doctor_says_false(left: str, sign: str, right: str) -> None:
    text = f"{left} {sign} {right}"
    truth = parse_comparison(text).judge(lambda name: Number.exactly(VALUES[name])).value
    assert Rule("a", text, "…").broken(VALUES, VALUES) == (truth is False)


def test_a_name_that_is_not_there_makes_a_rule_silent() -> None:
    rule = Rule("a", "a < missing", "…")
    assert rule.compared == {"a", "missing"}
    assert not rule.broken({}, {"a": 1.0})
    assert not Rule("a", "1 / zero > 0", "…").broken({}, {"zero": 0.0})


def test_a_rule_applies_only_where_its_conditions_hold() -> None:
    rule = Rule("a", "a < 1", "…", {"word": "x", "speculative_config.method": "ngram"})
    flat = {"word": "x", "speculative_config.method": "ngram"}
    assert rule.broken(flat, {"a": 2.0})
    assert not rule.broken(flat, {"a": 0.0})
    assert not rule.broken({**flat, "word": "y"}, {"a": 2.0})
    assert not rule.broken({"word": "x"}, {"a": 2.0})


@pytest.mark.parametrize("text", ["a", "a < b < c", "a.b < 1", "f(a) < 1", "a if b else c < 1", "'x' == 'y'"])
def test_what_is_no_comparison_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        Rule("a", text, "…")


def test_every_rule_names_a_flag_and_completes_a_sentence() -> None:
    for rule in RULES:
        assert rule.flag in rule.compared | {"speculative_config"}
        assert rule.text.startswith(("must", "prompt_lookup_min must"))
    for server in KINDS:
        baseline = effective({}, server)
        assert build_space(baseline, 8192).refusals(baseline) == []
