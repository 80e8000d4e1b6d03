"""Fixtures that several of the engine's tests share."""

from __future__ import annotations

import pytest

from engine.kernels.native import NativeUnavailable, load_library


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both sets of kernels of the CPU, one after the other; the name of the one in use."""
    if request.param == "torch":
        monkeypatch.setenv("VTUNE_NATIVE", "0")
    else:
        try:
            load_library()
        except NativeUnavailable as reason:
            pytest.skip(str(reason))
    return str(request.param)
