"""Weights back into network pickles: what is read again is what was written, by both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpt.errors import CheckpointError, ConfigError
from mpt.systems.stylegan2.inference.publishing import (
    like_pattern,
    network_bytes,
    published_tensors,
)
from mpt.systems.stylegan2.nn.stylegan2 import Discriminator, Generator, Settings
from mpt.systems.stylegan2.nn.weights.names import settings_of
from mpt.systems.stylegan2.nn.weights.network_pickle import read_network_pickle
from tests.systems.stylegan2.original import network_pickle


def networks(path: Path, **changes: object) -> tuple[Settings, dict[str, torch.Tensor]]:
    """Return settings of a file, and tensors of other networks of that architecture."""
    opened = read_network_pickle(path)
    given = {
        **settings_of(opened.networks["G"].arguments, opened.networks["D"].arguments, "it"),
        **changes,
    }
    settings = Settings.model_validate(
        {key: value for key, value in given.items() if key != "name"}
    )
    torch.manual_seed(1)
    gen, twin, disc = Generator(settings), Generator(settings), Discriminator(settings)
    return settings, published_tensors(settings, gen, twin, disc)


@pytest.mark.parametrize("name", ["a32", "b64"])
def test_a_new_file_reads_back_with_the_same_tensors_and_settings(
    name: str, tmp_path: Path
) -> None:
    original = network_pickle(name, tmp_path)
    settings, tensors = networks(original)
    there = set(read_network_pickle(original).described())
    assert {key for key in there if not key.endswith("resample_filter")} == set(tensors)
    written = tmp_path / "new.pkl"
    written.write_bytes(network_bytes(settings, tensors))
    opened = read_network_pickle(written)
    found = opened.tensors()
    assert set(found) == set(tensors)
    assert all(torch.equal(found[key], value) for key, value in tensors.items())
    again = settings_of(opened.networks["G"].arguments, opened.networks["D"].arguments, "it")
    assert (
        Settings.model_validate({key: value for key, value in again.items() if key != "name"})
        == settings
    )


def test_a_pattern_keeps_everything_but_its_numbers(tmp_path: Path) -> None:
    original = network_pickle("b64", tmp_path)
    settings, tensors = networks(original)
    written = tmp_path / "new.pkl"
    written.write_bytes(like_pattern(original, settings, tensors))
    assert written.stat().st_size == original.stat().st_size
    found, before = read_network_pickle(written).tensors(), read_network_pickle(original).tensors()
    assert all(torch.equal(found[key], value) for key, value in tensors.items())
    filters = [key for key in before if key.endswith("resample_filter")]
    assert filters
    assert all(torch.equal(found[key], before[key]) for key in filters)


def test_a_pattern_of_another_architecture_is_refused(tmp_path: Path) -> None:
    original = network_pickle("b64", tmp_path)
    with pytest.raises(ConfigError, match="makes 64 pixels, and this network 32"):
        like_pattern(original, *networks(original, image_size=32))
    with pytest.raises(CheckpointError, match="is to be written"):
        like_pattern(original, *networks(original, style_size=8))
    alone = network_pickle("alias_free_t", tmp_path)
    with pytest.raises(ConfigError, match="does not hold G, D and G_ema"):
        like_pattern(alone, *networks(original))
