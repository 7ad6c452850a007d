"""Inputs of tasks with one field, with several of different sizes, and with none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from mpt.config.options import DatasetOptions
from mpt.errors import ConfigError, DataError
from mpt.inference.inputs import find_files, match_files, needs_inputs, read_inputs
from mpt.seams import DataSpec, FieldSpec, Samples, Task

TWO_CAMERAS = DataSpec(
    {
        "rgb": FieldSpec((3, 24, 40), torch.uint8, "image"),
        "ir": FieldSpec((1, 10, 20), torch.float32, "image"),
        "boxes": FieldSpec((8, 4), torch.float32, "boxes"),
    },
    10,
)


def trained(
    inputs: tuple[str, ...] = ("rgb", "ir"), optional: bool = False, data: DataSpec = TWO_CAMERAS
) -> Any:
    task = Samples() if optional else Task()
    task.inputs = inputs
    run = SimpleNamespace(task=task, data=data, device=torch.device("cpu"))
    plugin = SimpleNamespace(optional=lambda name: None)
    config = SimpleNamespace(dataset=SimpleNamespace(settings=DatasetOptions(), plugin=plugin))
    return SimpleNamespace(run=run, test_data=None, config=config)


def match(of: Any, *wanted: str) -> list[dict[str, Path]]:
    return match_files(of.run.task, "fusion", find_files(wanted))


@pytest.fixture
def cameras(tmp_path: Path) -> Path:
    for name, mode, suffix, colour in (("a", "RGB", "png", (255, 0, 51)), ("b", "L", "jpg", 255)):
        for number in range(3):
            path = tmp_path / name / "day" / f"{number}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new(mode, (80, 48), colour).save(path)
    return tmp_path


def test_two_folders_become_fields_of_their_own_sizes_and_channels(cameras: Path) -> None:
    of = trained()
    samples = match(of, str(cameras / "a"), str(cameras / "b"))
    assert [sample["rgb"].name + sample["ir"].name for sample in samples] == [
        "0.png0.jpg",
        "1.png1.jpg",
        "2.png2.jpg",
    ]
    batches = [batch for batch, _ in read_inputs(of, samples, 2) if batch is not None]
    assert [set(batch) for batch in batches] == [{"rgb", "ir"}] * 2
    assert batches[0]["rgb"].shape == (2, 3, 24, 40)
    assert batches[1]["ir"].shape == (1, 1, 10, 20)
    assert batches[0]["rgb"].dtype == torch.float32
    assert torch.equal(batches[0]["rgb"][0, :, 0, 0], torch.tensor([1.0, 0.0, 0.2]))


def test_names_put_the_inputs_in_any_order_and_two_files_need_no_common_name(cameras: Path) -> None:
    first, second = cameras / "a/day/0.png", cameras / "b/day/2.jpg"
    assert match(trained(), f"ir={second}", f"rgb={first}") == [{"rgb": first, "ir": second}]
    assert match(trained(), str(first), str(second)) == [{"rgb": first, "ir": second}]


def test_a_file_without_its_partner_is_named(cameras: Path) -> None:
    (cameras / "b/day/1.jpg").unlink()
    with pytest.raises(DataError, match=r"'day/1' is not in both .*a and .*b"):
        match(trained(), str(cameras / "a"), str(cameras / "b"))


@pytest.mark.parametrize("wanted", [["{a}"], ["{a}", "{b}", "{a}"], ["rgb={a}", "rgb={b}"]])
def test_too_few_and_too_many_inputs_are_answered_with_what_to_write(
    cameras: Path, wanted: list[str]
) -> None:
    with pytest.raises(ConfigError, match="takes 2 inputs; write --input rgb=PATH --input ir=PATH"):
        match(trained(), *(text.format(a=cameras / "a", b=cameras / "b") for text in wanted))


def test_an_input_that_the_task_does_not_have_is_refused(cameras: Path) -> None:
    with pytest.raises(ConfigError, match="no input 'depth'; it has rgb, ir"):
        match(trained(), f"depth={cameras / 'a'}", str(cameras / "b"))


def test_a_task_of_one_input_takes_many_files_and_folders(cameras: Path) -> None:
    samples = match(trained(("rgb",)), str(cameras / "a"), str(cameras / "b/day/0.jpg"))
    assert [sample["rgb"].name for sample in samples] == ["0.png", "1.png", "2.png", "0.jpg"]


def test_a_file_with_an_equals_sign_in_its_name_is_a_file(
    cameras: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cameras)
    (cameras / "rgb=x.png").write_bytes((cameras / "a/day/0.png").read_bytes())
    assert match(trained(("rgb",)), "rgb=x.png") == [{"rgb": Path("rgb=x.png")}]


def test_a_task_without_inputs_refuses_files_and_gets_a_wish_for_samples(cameras: Path) -> None:
    of = trained(())
    with pytest.raises(ConfigError, match="makes images from noise and takes none"):
        match(of, str(cameras / "a"))
    assert [batch for batch, _ in read_inputs(of, [], 4)] == [None]


def test_inputs_are_needed_unless_they_are_optional() -> None:
    assert needs_inputs(trained().run.task)
    assert not needs_inputs(trained(optional=True).run.task)
    assert not needs_inputs(trained(()).run.task)


def test_channels_that_no_file_has_are_refused(cameras: Path) -> None:
    data = DataSpec({"flow": FieldSpec((2, 8, 8), torch.float32)}, 1)
    of = trained(("flow",), data=data)
    with pytest.raises(DataError, match="'flow' has 2 channels"):
        list(read_inputs(of, match(of, str(cameras / "a")), 1))
