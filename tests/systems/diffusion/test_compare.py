"""`mpt compare` of precision modes and of a packed base, on a LoRA of a small network of diffusers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpt.commands import compare
from mpt.config.text.yaml_text import write_text
from tests.systems.diffusion.library import diffusers
from tests.systems.diffusion.test_ranks import LORA, folder_of_data


@pytest.mark.slow
def test_bfloat16_and_a_packed_base_are_judged_by_the_test_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diffusers()
    settings = folder_of_data(tmp_path) | {
        "memory": LORA,
        "optimizer": {"name": "adamw", "lr": 1e-3},
    }
    file = tmp_path / "lora.yaml"
    file.write_text(write_text(settings))
    variant = ("precision=bf16", "memory.low_bit_base=fp8")
    compare.run(
        compare.Command(
            config=file, variant=variant, seeds=1, json=True, device="cpu", runs=str(tmp_path)
        )
    )
    told = json.loads(capsys.readouterr().out)
    assert told["metric"] == "test_loss"
    plain, half, packed = told["modes"]
    assert half["peak_ratio"] < 1
    assert packed["memory"]["parameters"] < plain["memory"]["parameters"]
    for side in (half, packed):
        assert side["final"]["mean"] == pytest.approx(plain["final"]["mean"], rel=0.02)
