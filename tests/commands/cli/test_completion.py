"""What the shell is told of configurations, runs, settings and values."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpt.commands.cli.completion import complete_config, complete_override, complete_run


def override(typed: str, *before: str, config: str | None = None) -> list[str]:
    context: Any = SimpleNamespace(params={"config": config, "overrides": before})
    return complete_override(context, typed)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("prec", ["precision.", "precision="]),
        ("precision=bf16-k", ["precision=bf16-kahan"]),
        ("train.early_stopping.mi", ["train.early_stopping.min_delta="]),
        ("train.determ", ["train.deterministic="]),
        ("train.deterministic=", ["train.deterministic=true", "train.deterministic=false"]),
        ("memory.recompute=t", ["memory.recompute=true"]),
        ("nothing.at", []),
        ("train.steps=5", []),
    ],
)
def test_settings_and_values_are_completed(typed: str, expected: list[str]) -> None:
    assert sorted(override(typed)) == sorted(expected)


def test_settings_are_those_of_the_parts_that_are_chosen(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: {name: small_cnn}\ndataset: digits\n")
    of_model = override("model.", config=str(file))
    assert "model.dropout=" in of_model
    assert "model.latent_size=" not in of_model
    assert "model.latent_size=" in override("model.", "model=dcgan", config=str(file))
    assert "model.latent_size=" in override("model.", config="@dcgan_amp")
    file.write_text("model: [")
    assert "model.latent_size=" in override("model.", config=str(file))  # of any model


def test_bash_takes_a_setting_and_its_value_for_three_words() -> None:
    assert override("", "precision") == override("", "precision", "=")
    assert "amp" in override("a", "precision", "=")


def test_runs_and_configurations_are_completed_by_name_and_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("digits", "digits-2", "faces"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    context: Any = SimpleNamespace(params={})
    assert complete_run(context, "dig") == ["digits", "digits-2"]
    assert complete_run(context, "runs/f") == ["runs/faces/"]
    assert complete_config("@dcgan_a") == ["@dcgan_amp"]
    (tmp_path / "mine.yaml").touch()
    assert complete_config("mi") == ["mine.yaml"]
    assert complete_config("nowhere/") == []
