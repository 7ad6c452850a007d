"""The words about a half dtype on this device."""

import pytest
import torch

from mpt.config.load import load_config
from mpt.precision.shared.choice import choose_dtype


@pytest.mark.parametrize(
    ("capability", "slow"), [("AVX2", True), ("DEFAULT", True), ("AVX512", False)]
)
def test_a_cpu_that_emulates_bfloat16_slowly_is_told_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capability: str, slow: bool
) -> None:
    """A DCGAN's step takes nine times as long there, and it was called no speed-up."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    chosen, reason = choose_dtype(
        load_config({"model": "small_cnn"}).precision.settings, torch.device("cpu")
    )
    assert chosen == torch.bfloat16
    assert ("many times as long as with precision=fp32" in reason) is slow
    assert ("no speed-up over fp32" in reason) is not slow
