"""Bad values and labels are named with their sample, in one line, before they become a NaN or an index error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mpt.data.loading.loader import Loader
from mpt.engine.state.evaluation import evaluate
from mpt.errors import DataError, PartError
from mpt.seams import IGNORED, Batch, Dataset, DataSpec, FieldSpec
from mpt.seams.samples import Adopted, adopt
from tests.engine import parts


class Small(Dataset):
    def __init__(self, change: Callable[[dict[str, Any]], object] = lambda batch: None) -> None:
        self.spec = DataSpec(parts.DIGITS.fields, 16, parts.DIGITS.classes)
        self.batch = parts.batch(size=16)
        change(self.batch)

    def fetch(self, indices: Any, epoch: int) -> Batch:
        return {name: value[list(indices)] for name, value in self.batch.items()}

    def name_of(self, index: int) -> str:
        return f"picture {index}.png"


def put(field: str, place: Any, value: float) -> Callable[[dict[str, Any]], object]:
    return lambda batch: batch[field].__setitem__(place, value)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            put("image", (5, 0, 3, 3), float("nan")),
            "picture 5.png: its 'image' holds NaN or infinite values",
        ),
        (
            put("image", (7, 0, 0, 0), float("-inf")),
            "picture 7.png: its 'image' holds NaN or infinite values",
        ),
        (
            put("label", 3, 10),
            "picture 3.png: its label is 10, and there are 10 classes, numbered from 0 to 9",
        ),
        (put("label", 4, -1), "picture 4.png: its label is -1, and there are 10 classes"),
    ],
    ids=["nan", "infinite", "too large", "negative"],
)
def test_a_bad_sample_is_named(change: Any, said: str, workers: int) -> None:
    loader = Loader(Small(change), 8, seed=0, workers=workers)
    batches = loader.batches()
    with pytest.raises(DataError, match=said):
        [next(batches) for _ in range(2)]
    assert "\n" not in said
    later = loader.batches(start_step=2)
    assert len([next(later) for _ in range(2)]) == 2, "looked at in the first epoch alone"


def change_of(name: str, made: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda batch: {**batch, name: made(batch[name])}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda batch: {"image": batch["image"]}, "returned image; 'label', which its spec has,"),
        (lambda batch: (batch["image"], batch["label"]), "returned a tuple; expected a dict"),
        (change_of("image", lambda image: image.numpy()), "returned a ndarray as 'image'; expect"),
        (change_of("image", lambda image: image[:-1]), r"of shape \(7, 1, 16, 16\) for 8 samples"),
        (change_of("image", torch.Tensor.double), r"'image' in float64 .* its spec says float32"),
        (change_of("label", torch.Tensor.float), r"'label' in float32 of shape \(8,\)"),
        (
            change_of("image", lambda image: image.expand(-1, 3, -1, -1)),
            r"\(8, 3, 16, 16\) for 8 samples; its spec says float32 of shape \(8, 1, 16, 16\)",
        ),
        (change_of("label", lambda label: label[:, None]), r"of shape \(8, 1\) for 8 samples"),
    ],
    ids=["missing", "a tuple", "numpy", "fewer", "float64", "float labels", "channels", "2d"],
)
def test_a_batch_of_another_layout_than_the_spec_is_refused_in_a_line(made: Any, said: str) -> None:
    class Wrong(Small):
        def fetch(self, indices: Any, epoch: int) -> Any:
            return made(super().fetch(indices, epoch))

    with pytest.raises(DataError, match=f"data set Wrong: its fetch .*{said}"):
        next(Loader(Wrong(), 8, seed=0).batches())


def test_a_smaller_picture_and_one_in_bytes_are_of_the_layout() -> None:
    def change(batch: dict[str, Any]) -> None:
        batch["image"] = (batch["image"][:, :, :12, :8] * 255).to(torch.uint8)

    data = Small(change)
    fields = {**data.spec.fields, "image": FieldSpec((1, 16, 16), torch.float32, "image")}
    data.spec = DataSpec(fields, 16, data.spec.classes)
    assert next(Loader(data, 8, seed=0).batches())["image"].shape == (8, 1, 12, 8)


def test_large_values_and_ignored_labels_are_no_fault() -> None:
    def change(batch: dict[str, Any]) -> None:
        # their sum is infinite
        batch["image"] = torch.full_like(batch["image"], 3e38)
        batch["label"][3] = IGNORED

    batches = Loader(Small(change), 8, seed=0).batches()
    assert sum(int((next(batches)["label"] == IGNORED).sum()) for _ in range(2)) == 1


def test_samples_whose_label_is_ignored_are_left_out_of_an_evaluation() -> None:
    run = parts.classifier()
    some, fewer = Small(put("label", slice(0, 6), IGNORED)), Small()
    fewer.spec = DataSpec(parts.DIGITS.fields, 10, parts.DIGITS.classes)
    fewer.batch = {name: value[6:] for name, value in some.batch.items()}
    assert evaluate(run, some, 8) == pytest.approx(evaluate(run, fewer, 8))
    with pytest.raises(DataError, match="none of the 16 test samples has a label"):
        evaluate(run, Small(put("label", slice(0, 16), IGNORED)), 8)


def test_samples_whose_label_is_ignored_weigh_nothing_and_count_in_no_figure() -> None:
    run = parts.classifier(task={"class_weights": {"3": 4.0}, "metrics": ["top_five"]})
    run.task.modules["net"].eval()  # BatchNorm would see other batches
    some, fewer = Small(put("label", slice(0, 6), IGNORED)), Small()
    fewer.spec = DataSpec(parts.DIGITS.fields, 10, parts.DIGITS.classes)
    fewer.batch = {name: value[6:] for name, value in some.batch.items()}
    (loss,), (expected,) = (run.task.losses(data.batch) for data in (some, fewer))
    assert float(loss.value.detach()) == pytest.approx(float(expected.value.detach()))
    assert float(loss.weight) == float(expected.weight) > 0
    assert evaluate(run, some, 8) == pytest.approx(evaluate(run, fewer, 8))
    evaluate(run, some, 8)
    assert [one["index"] for one in run.task.details["examples"]] == list(range(6, 16))
    assert "truth" not in run.task.infer(some.batch, 0, 0).rows[0]


def test_classes_that_come_equally_often_are_looked_at_in_every_batch() -> None:
    data = Small(put("label", 15, 99))
    data.class_labels = lambda: [0] * 15 + [1]  # type: ignore[method-assign]
    loader = Loader(data, 4, seed=0, sampling="balanced")
    late = next(step for step in range(1, 9) if 15 in loader.indices(step)[0])
    with pytest.raises(DataError, match=r"picture 15\.png: its label is 99"):
        next(loader.batches(start_step=late))


class WithItems(Dataset):
    def __init__(self, sample: Callable[[int], Any]) -> None:
        self.spec, self.sample = DataSpec(parts.DIGITS.fields, 16, parts.DIGITS.classes), sample

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


@pytest.mark.parametrize(
    "adopt", [lambda data: data, lambda data: Adopted(Outside(data))], ids=["derived", "adopted"]
)
def test_a_data_set_with_items_alone_is_taken(adopt: Any) -> None:
    batch = parts.batch(size=16)
    by_name = adopt(
        WithItems(
            lambda index: {"label": int(batch["label"][index]), "image": batch["image"][index]}
        )
    )
    in_order = adopt(
        WithItems(lambda index: (batch["image"][index].numpy(), batch["label"][index]))
    )
    for data in (by_name, in_order):
        found = data.fetch([3, 1], 0)
        assert all(torch.equal(found[name], batch[name][[3, 1]]) for name in batch)
    with pytest.raises(
        DataError, match=r"its __getitem__\(0\) gave a mapping of picture; expected are the fields"
    ):
        adopt(WithItems(lambda index: {"picture": 0})).fetch([0], 0)
    with pytest.raises(DataError, match="its samples do not make a batch"):
        adopt(WithItems(lambda index: (torch.zeros(index + 1), 0))).fetch([0, 1], 0)


class Outside:
    """Derives from nothing of mpt."""

    def __init__(self, data: WithItems) -> None:
        self.data, self.spec = data, data.spec

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def test_a_data_set_without_samples_or_layout_is_said_in_one_line() -> None:
    class Empty(Dataset):
        spec = DataSpec(parts.DIGITS.fields, 16)

    with pytest.raises(
        DataError, match=r"data set Empty: it has neither fetch\(indices, epoch\) nor __getitem__"
    ):
        Empty().fetch([0], 0)
    spec = DataSpec(parts.DIGITS.fields, 16)
    assert adopt(found := type("Whole", (Dataset,), {"spec": spec})()) is found
    for made, words in (
        (
            type("Mine", (Dataset,), {"spec": spec, "fetch": lambda self, indices: {}})(),
            r"returned a Mine, whose fetch \(.*\) takes \(self, indices\); it is called as fetch\(self, indices, ep",
        ),
        (None, "the data set's build returned nothing; expected an object of mpt.seams.Dataset"),
        ([1, 2], "data set list: it has no spec, which a data set's build must return with it"),
        (type("Mine", (Dataset,), {})(), "data set Mine: it has no spec, which "),
        (type("Mine", (), {"spec": spec})(), "data set Mine: it has no __len__, which "),
        (
            type("Mine", (Dataset,), {"spec": {}})(),
            "its spec is a dict; expected a mpt.seams.DataSpec",
        ),
        (
            type("Mine", (Dataset,), {"spec": DataSpec(spec.fields, ("a", "b"))})(),  # type: ignore[arg-type]
            "data set Mine: its spec's size is a tuple; expected a number of samples",
        ),
    ):
        with pytest.raises(PartError, match=words):
            adopt(made)
