"""A model beside data that it cannot learn from is refused when it is built, in words."""

import pytest
import torch

from mpt.config.load import load_config
from mpt.config.registry import names
from mpt.engine.build import build_run
from mpt.errors import DataError
from mpt.seams import DataSpec, FieldSpec

IMAGES = DataSpec({"image": FieldSpec((3, 64, 64), torch.float32), "label": FieldSpec((), torch.int64)}, 8, ("a", "b"))
FACES = DataSpec({"src_warped": FieldSpec((3, 64, 64), torch.float32), "age": FieldSpec((), torch.float32)}, 8)


@pytest.mark.parametrize("model", names("nn"))
def test_data_of_another_kind_is_named_with_what_is_missing(model: str) -> None:
    config = load_config({"model": {"name": model}})
    data, wanted = (IMAGES, "src_warped") if config.task.name == "face_swap" else (FACES, "image")
    with pytest.raises(DataError, match=rf"it needs '{wanted}' of each sample, but this data set delivers ") as caught:
        build_run(config, torch.device("cpu"), data)
    assert caught.value.exit_code == 3
