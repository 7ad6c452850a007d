"""What `import mpt` offers does what the commands do, and docs/reference/api.md runs as it stands."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mpt
from mpt.errors import ConfigError, DataError

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(
    r"^```python\n(.*?)^```",
    (ROOT / "docs" / "reference" / "api.md").read_text("utf-8"),
    re.M | re.S,
)
SMALL = {
    "model": "small_cnn",
    "dataset": "digits",
    "precision": "bf16",
    "optimizer": {"schedule": "cosine"},
    "memory": {"micro_batch": 16},
    "task": {"ema": 0.9},
    "train": {"steps": 4, "batch_size": 32},
}


def takes_long(block: str) -> bool:
    """Does this block of the page start several processes?"""
    return any(words in block for words in ("mpt.compare(", "vram=", "mpt.verify_resume("))


def run_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: list[str]) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    training = "from tests.planner.own.foreign_steps import decoder as build\n"
    (tmp_path / "my_training.py").write_text(training, "utf-8")  # which the page imports
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    load, smaller = (
        mpt.load,
        {"@classify_digits": ["model.features=4"]},
    )  # half precision is slow on a CPU
    monkeypatch.setattr(
        mpt, "load", lambda source, *words: load(source, *words, *smaller.get(str(source), []))
    )
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/reference/api.md", "exec"), names)


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(BLOCKS) >= 8
    run_page(tmp_path, monkeypatch, [block for block in BLOCKS if not takes_long(block)])


@pytest.mark.slow
def test_the_page_s_long_examples_run_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_page(tmp_path, monkeypatch, [BLOCKS[0], *(block for block in BLOCKS if takes_long(block))])


def test_a_loop_of_one_s_own_leaves_the_weights_of_train_bit_for_bit(tmp_path: Path) -> None:
    config = mpt.load(SMALL)
    run = mpt.train(config, runs=tmp_path)
    built = mpt.build(config)
    for step, batch in zip(range(built.total_steps), built.batches(), strict=False):
        done = mpt.update(built, batch, step)
        assert done["net"].finite
    trained = load_file(run.path / "checkpoints" / "step-00000004" / "state.safetensors")
    for name, module in built.modules.items():
        for key, value in module.state_dict().items():
            assert torch.equal(trained[f"modules.{name}.{key}"], value), (name, key)
    assert built.evaluate() == run.figures


def test_a_state_put_back_goes_on_as_if_never_stopped() -> None:
    config = mpt.load(SMALL)
    first = mpt.build(config)
    batches = [batch for _, batch in zip(range(4), first.batches())]
    for step in (0, 1):
        mpt.update(first, batches[step], step)
    second = mpt.build(config)
    second.load_state_dict(first.state_dict())
    for built in (first, second):
        for step in (2, 3):
            mpt.update(built, batches[step], step)
    for a, b in zip(
        first.modules["net"].parameters(), second.modules["net"].parameters(), strict=True
    ):
        assert torch.equal(a, b)


def test_mistakes_are_raised_as_the_command_would_say_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key 'rl'"):
        mpt.load({"model": "small_cnn", "optimizer": {"rl": 1}})
    with pytest.raises(ConfigError, match="no precision mode"):
        mpt.compare(mpt.load(SMALL), "fp32", "fp33", runs=tmp_path)
    with pytest.raises(DataError):
        mpt.infer(tmp_path / "none", ["nowhere.png"])
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mpt.nothing  # noqa: B018


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one of 2"):
        mpt.train(mpt.load(SMALL), runs=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_doctor_is_called_whether_or_not_its_package_was_imported_before(
    tmp_path: Path,
) -> None:
    import mpt.doctor.findings

    (section,) = mpt.doctor(mpt.load(SMALL), only=["data"])  # type: ignore[operator]
    assert isinstance(section, mpt.doctor.findings.Section)
    assert section.worst in ("ok", "note")
    with pytest.raises(ConfigError, match=r"'heart'.*environment"):
        mpt.doctor(only=["heart"])  # type: ignore[operator]


def test_runs_and_variants_are_compared_as_on_the_command_line(tmp_path: Path) -> None:
    runs = [
        mpt.train(mpt.load(SMALL, f"seed={seed}", f"name=seed-{seed}"), runs=tmp_path)
        for seed in (0, 1)
    ]
    comparison = mpt.compare([run.path for run in runs], runs=tmp_path)
    assert [row.group.label for row in comparison.rows] == ["seed-0", "seed-1"]
    assert mpt.diff(*(run.path for run in runs), only_files=True).verdict == "apart"
    with pytest.raises(ConfigError, match="was given twice"):
        mpt.compare(mpt.load(SMALL), variants=["seed=1", "seed=1"], runs=tmp_path)
