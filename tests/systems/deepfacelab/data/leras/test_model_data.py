"""Options of a model that are of a type that DeepFaceLab never writes are refused by name, never by a traceback."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpt.errors import CheckpointError, ConfigError
from mpt.systems.deepfacelab.commands.shared.convert_leras import config_of_data
from mpt.systems.deepfacelab.commands.shared.model_folder import Folder
from mpt.systems.deepfacelab.data.leras.leras_pickle import write_plain
from mpt.systems.deepfacelab.data.leras.model_data import MAPPED, read_model_data

OPTIONS = {
    **{
        "resolution": 64,
        "archi": "df-ud",
        "ae_dims": 32,
        "e_dims": 16,
        "d_dims": 16,
        "d_mask_dims": 8,
    },
    **{
        "adabelief": True,
        "lr_dropout": "n",
        "clipgrad": False,
        "target_iter": 0,
        "pretrain": False,
    },
    **{"gan_power": 0.0, "gan_patch_size": 8, "gan_dims": 16, "face_type": "f"},
}
ODD: list[Any] = [
    *(None, "x", b"x", [], [1], {}, {"a": 1}, (), 1.5, -1, 2**70, float("nan"), float("inf"), True),
    *(np.ones(3), np.zeros((0,)), np.float32("nan"), np.int64(-5)),
]


@pytest.mark.parametrize("name", [*MAPPED, "adabelief", "lr_dropout", "clipgrad", "target_iter"])
def test_an_option_of_another_type_is_an_error_in_words(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new_SAEHD_data.dat"
    for value in ODD:
        path.write_bytes(write_plain({"options": {**OPTIONS, name: value}, "iter": 5}))
        with contextlib.suppress(ConfigError):  # which names the setting and the value
            try:
                data = read_model_data(path)
            except CheckpointError as error:
                refused = str(error)
                continue
            config_of_data(data, Folder(tmp_path, "new_SAEHD_"), None)
    assert f"its option {name} is a" in refused
