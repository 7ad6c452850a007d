"""`mpt plan presets`: a patch for each usual size of card from one set of traces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from mpt.commands.cli.console import open_console
from mpt.commands.plan import Command as PlanArguments
from mpt.commands.planning import plan_presets
from mpt.commands.planning.plan_presets import Command as PlanPresetsArguments
from mpt.config.finding import shipped
from mpt.config.load import load_config
from mpt.errors import ConfigError, MemoryBudgetError
from mpt.planner.client.session import Session
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.recipes import presets
from mpt.planner.recipes.patch_origin import find_strange_patches
from mpt.planner.recipes.recipe import describe_patch
from mpt.planner.recipes.search import search
from tests.planner.test_command import Shared, arguments

__all__ = ["arguments"]  # a fixture
SHARES = {6: 0.0, 8: 0.7, 12: 0.85, 24: 2.0}
"""Size -> budget for the tensors, as a share of what the configuration reserves as it stands."""


@pytest.mark.slow
def test_each_size_gets_the_recipe_that_a_search_of_its_own_finds(
    arguments: PlanArguments,
    session: Session,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = load_config(arguments.config, allow=["tests"])
    whole = session.plan([config])[0].get()
    budgets = {
        size: whole.context_bytes + int(share * whole.reserved) for size, share in SHARES.items()
    }
    monkeypatch.setattr(presets, "Session", Shared(session))
    monkeypatch.setattr(presets, "SIZES", tuple(SHARES))
    monkeypatch.setattr(presets, "usable_bytes", lambda gpu, size: budgets[size])
    asked = PlanPresetsArguments(
        arguments.config, allow=("tests",), output=str(tmp_path / "presets"), json=True
    )
    plan_presets.run(asked)
    told: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["presets"]
    session.judge_by(())
    assert [one["size_gb"] for one in told] == list(SHARES)
    assert told[0]["patch"] is None
    alone = search(session, config, find_gpu(presets.REFERENCE), budgets[12]).recipes[0]
    assert (told[2]["patch"], told[2]["total_bytes"]) == (alone.patch, alone.total)
    assert (told[-1]["patch"], told[-1]["path"]) == ({}, None)
    for preset in told[1:-1]:
        path = Path(preset["path"])
        assert path == tmp_path / "presets" / f"unet_{preset['size_gb']}gb.yaml"
        assert preset["total_bytes"] <= budgets[preset["size_gb"]]
        assert yaml.safe_load(path.read_text()) == preset["patch"]
        assert load_config(arguments.config, patches=[path], allow=["tests"])
    with pytest.raises(ConfigError, match="exists; remove it first"):
        plan_presets.run(asked)
    monkeypatch.setattr(presets, "usable_bytes", lambda gpu, size: budgets[6])
    with pytest.raises(MemoryBudgetError, match="nothing fits even 24 GB"):
        plan_presets.run(replace(asked, output=str(tmp_path / "none"), json=False))
    assert capsys.readouterr().out.count("nothing fits") == len(SHARES)
    session.judge_by(())


def test_files_of_presets_are_named_in_whole_however_narrow_the_table_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(plan_presets, "describe_patch", lambda patch: "micro batch 64")
    monkeypatch.setattr(plan_presets, "describe_cost", lambda recipe: "not bit-equal, BatchNorm")
    recipe: Any = SimpleNamespace(total=2**30, patch={}, plan=SimpleNamespace(step_seconds=1.0))
    folder = Path("presets of the eighth floor")
    config = load_config({"model": "small_cnn", "dataset": "digits"})
    rows = [
        presets.Preset(size, size * 2**30, recipe, path)
        for size, path in (
            (6, folder / "resnet50_6gb.yaml"),
            (8, folder / "resnet50_8gb.yaml"),
            (24, None),
        )
    ]
    plan_presets.print_presets(open_console(), config, find_gpu("rtx2060"), rows)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert (
        "wrote 2 files into presets of the eighth floor: resnet50_6gb.yaml, resnet50_8gb.yaml"
        in " ".join(shown.split())
    )


def test_presets_that_come_with_mpt_are_laid_over_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "presets").mkdir()
    (tmp_path / "large.yaml").write_text("{model: small_cnn, train: {batch_size: 64, steps: 1}}")
    (tmp_path / "presets" / "large_8gb.yaml").write_text("memory: {micro_batch: 16}")
    monkeypatch.setattr(shipped, "folders", lambda: [tmp_path])
    config = load_config("@large", patches=[Path("@large_8gb")])
    assert "micro_batch" in config.memory.tricks
    assert list(shipped.shipped_configs()) == ["large"]
    with pytest.raises(ConfigError, match=r"^@large_8g: did you mean @large_8gb\?"):
        load_config("@large", patches=[Path("@large_8g")])


def test_every_shipped_preset_loads_over_its_configuration_and_is_what_the_table_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarks" / "presets.md").read_text("utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith("| `")
    ]
    table = {
        f"{row[0].strip('`')}_{size}gb": row[2:]
        for row in rows
        if len(row) == 7
        for size in row[1].split(", ")
    }
    shipped_ones = shipped.shipped_presets()
    assert len(table) == 7 * len(presets.SIZES)
    assert set(shipped_ones) == {name for name, row in table.items() if row[1] != "as it stands"}, (
        "none changes nothing"
    )
    for name, path in shipped_ones.items():
        plain, size = name.rsplit("_", 1)
        config = load_config(f"@{plain}", patches=[path])
        _, words, origin, *_ = path.read_text("utf-8").splitlines()
        told = json.loads(origin.partition(": ")[2])
        batch, recipe, cost, memory, step = table[name]
        step, _, card = step.partition(", ")
        if card:  # of a card of its own, with other settings, by a script of the system's
            assert words.startswith(f"# {recipe}: {memory} of the "), name
            assert (
                f"that a card of {size[:-2]} GB gives to programs, {step} a step on an {card};"
                in words
            ), name
        else:
            assert words.startswith(f"# {recipe} ({cost}): {memory} of the "), name
            assert words.endswith(
                f"that a card of {size[:-2]} GB gives to programs, {step} a step on an rtx2060"
            ), name
            assert describe_patch(yaml.safe_load(path.read_text("utf-8"))) == recipe
        assert told["batch_size"] == config.train.batch_size == int(batch)
        assert find_strange_patches([path], config) == []


def test_a_size_of_card_gives_programs_less_than_its_name() -> None:
    reference = find_gpu(presets.REFERENCE)
    gib = [presets.usable_bytes(reference, size) / 2**30 for size in presets.SIZES]
    assert gib == [
        pytest.approx(wanted, abs=0.15) for wanted in (5.8, 7.8, 9.8, 11.75, 15.55, 23.6)
    ]
