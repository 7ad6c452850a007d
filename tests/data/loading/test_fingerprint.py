"""One changed pixel of one test picture shows, however the samples are batched; a compare of such runs is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from mpt.commands import compare, train
from mpt.commands.compare import Command as CompareArguments
from mpt.commands.train import Command as TrainArguments
from mpt.data.loading.fingerprint import Fingerprint, combine, hash_of_list
from mpt.errors import ConfigError
from mpt.run.records.data_layout import read_training_list
from mpt.run.records.layout import open_run
from mpt.run.records.recorder import last_test_set
from mpt.seams import Batch


def fingerprint(batch: Batch, sizes: list[int]) -> str:
    """Return the hash of samples that come in batches of these sizes, each read by a process of its own."""
    values, first = [], 0
    for size in sizes:
        one = Fingerprint()
        one.add(first, {name: value[first : first + size] for name, value in batch.items()})
        values.append(one.value)
        first += size
    return combine(values)


def test_the_hash_does_not_depend_on_batches_and_shows_every_change() -> None:
    batch = {
        "image": torch.randint(0, 256, (6, 3, 4, 4), dtype=torch.uint8),
        "label": torch.arange(6),
        "mask": torch.rand(6, 2) > 0.5,
    }
    whole = fingerprint(batch, [6])
    assert whole == fingerprint(batch, [4, 2]) == fingerprint(batch, [1, 2, 3])
    padded = {**batch, "label": torch.stack([batch["label"], torch.zeros(6, dtype=torch.int64)], 1)}
    assert fingerprint(padded, [6]) == whole, (
        "padding with zeros differs with the samples that share a batch"
    )
    swapped = {name: value[[1, 0, 2, 3, 4, 5]] for name, value in batch.items()}
    changed = {**batch, "image": batch["image"].clone()}
    changed["image"][3, 1, 2, 2] ^= 1
    assert len({whole, fingerprint(swapped, [6]), fingerprint(changed, [6])}) == 3


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        for index in range(8):
            folder = tmp_path / "pictures" / split / ("cat" if index % 2 else "dog")
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (30 * index, 200, 10)).save(folder / f"{index}.png")
    (tmp_path / "base.yaml").write_text(
        "model: {name: small_cnn, image_size: 8, features: 4}\n"
        "dataset: {name: image_folder, root: pictures, image_size: 8}\n"
        "precision: fp32\ntrain: {steps: 2, batch_size: 4, plan_memory: false}\n"
    )
    return tmp_path / "pictures"


def test_runs_on_other_test_pictures_and_a_resume_on_another_list_are_told(
    pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.run(TrainArguments(Path("base.yaml"), name="before", quiet=True))
    picture = pictures / "test" / "cat" / "1.png"
    Image.new("RGB", (8, 8), (1, 2, 3)).save(picture)
    (pictures / "train" / "cat" / "1.png").rename(pictures / "train" / "cat" / "10.png")
    train.run(TrainArguments(Path("base.yaml"), ("precision=bf16",), name="after", quiet=True))
    sets = [last_test_set(open_run(Path("runs", name))) for name in ("before", "after")]
    lists = [read_training_list(Path("runs", name, "data.json")) for name in ("before", "after")]
    assert None not in (*sets, *lists)
    assert len({*sets}) == len({*lists}) == 2
    with pytest.raises(
        ConfigError,
        match=r"the test set of .*before and .*after has the same settings and other sam",
    ):
        compare.run(CompareArguments(("before", "after")))
    capsys.readouterr()
    train.run(
        TrainArguments(
            Path("base.yaml"), ("train.steps=4",), name="before", quiet=True, resume="before"
        )
    )
    kinds = [json.loads(line) for line in Path("runs/before/events.jsonl").read_text().splitlines()]
    assert "test_set" in [line["kind"] for line in kinds]
    assert any("the list of training samples changed" in line.get("message", "") for line in kinds)


def test_the_list_counts_names_and_their_order(pictures: Path) -> None:
    class Named:
        def __init__(self, *names: str) -> None:
            self.names = names

        def __len__(self) -> int:
            return len(self.names)

        def name_of(self, index: int) -> str:
            return self.names[index]

    one = hash_of_list(Named("/a/cat/1.png", "/a/cat/2.png"))  # type: ignore[arg-type]
    assert one == hash_of_list(Named("/elsewhere/cat/1.png", "/elsewhere/cat/2.png"))  # type: ignore[arg-type]
    assert one != hash_of_list(Named("/a/cat/2.png", "/a/cat/1.png"))  # type: ignore[arg-type]
    assert one != hash_of_list(Named("/a/dog/1.png", "/a/cat/2.png"))  # type: ignore[arg-type]
