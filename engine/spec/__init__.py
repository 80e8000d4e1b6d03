"""Speculative decoding: proposers and lossless rejection."""
