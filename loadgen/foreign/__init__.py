"""Results of other benchmark tools: read as what they state, reported and compared as far as that goes."""
