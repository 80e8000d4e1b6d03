"""Mutants that no test can kill, for nothing that can be observed differs: by file, the mutant and why."""

NO_LADDER = "an axis without a direction is on no ladder, where alone the sign counts"
LENGTHS = "(len(b) for _, b in values.values())"
ONE_EACH = "saves work where no config was repeated"
ALWAYS_THERE = "only axes without a direction are ever absent, and those are on no ladder"

EQUIVALENT: dict[str, dict[str, str]] = {
    "tuner/search/crashes.py": {
        "cause_of: found[1] → found[0]": "the whole match is the group",
        "Crashes.forbids: self._failed → True": "saves work where nothing failed",
        "Crashes.chance: cause not in proven → True": "saves work where a cause comes again",
        "Crashes._gaps: strict=True → strict=False": "both are as long as the axes",
        "Crashes._gaps: 0 → 1": NO_LADDER,
        "Crashes._gaps: 0 → -1": NO_LADDER,
        "Crashes._gaps: codes >= 0 → codes >= -1": ALWAYS_THERE,
        "Crashes._gaps: than >= 0 → than >= -1": ALWAYS_THERE,
    },
    "tuner/study/confirmation.py": {
        "judge_pairs: strict=True → strict=False": "both sides have a run of every pair",
        f"assess_pooled: max({LENGTHS}) → min({LENGTHS})": "every figure has a value of every pair",
    },
    "loadgen/measure/estimator.py": {
        "holm: 1.0 → 2.0": "every place is filled",
        "holm: 1.0 → 0.5": "every place is filled",
        "judge_estimate: size > 0 → size >= 0": "a size of 0 is below every floor",
    },
    "tuner/search/repeats.py": {
        "merge_repeats: all((len(group) == 1 for group in groups.values())) → False": ONE_EACH,
        "merge_repeats: len(group) == 1 → len(group) == 0": ONE_EACH,
        "_distance: math.inf if end <= 0 else abs(math.log(end / value)) → "
        "-(math.inf if end <= 0 else abs(math.log(end / value)))": "distances are squared",
    },
}
