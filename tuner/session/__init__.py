"""One call of ``vtune optimize``: from its options to a job and a study."""
