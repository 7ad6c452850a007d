"""NVIDIA's network pickles: read without running them, equal in all outputs, refused in bounded time."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.errors import CheckpointError
from mpt.systems.stylegan2.inference.generators import Look, Painter, as_bytes, open_painter
from mpt.systems.stylegan2.inference.publishing import fragment
from mpt.systems.stylegan2.nn.stylegan2 import Discriminator, Generator, Settings, truncated
from mpt.systems.stylegan2.nn.weights.names import settings_of, to_ours
from mpt.systems.stylegan2.nn.weights.network_pickle import (
    NESTED_WORK,
    NetworkMachine,
    is_network_pickle,
    read_network_pickle,
)
from tests.systems.stylegan2.original import apart, network_pickle, recorded, written

NAMES = ("a32", "b64")
CLOSE = 5e-6


def discriminator(path: Path) -> Discriminator:
    opened = read_network_pickle(path)
    given = settings_of(opened.networks["G"].arguments, opened.networks["D"].arguments, "it")
    settings = Settings.model_validate(
        {key: value for key, value in given.items() if key != "name"}
    )
    disc = Discriminator(settings)
    tensors = to_ours(settings.resolutions(), opened.tensors())
    disc.load_state_dict(
        {key[5:]: value for key, value in tensors.items() if key.startswith("disc.")}
    )
    return disc


def generator(path: Path) -> tuple[Painter, Generator]:
    painter = open_painter(str(path), path.parent, "cpu")
    assert isinstance(painter.network, Generator)
    return painter, painter.network


@pytest.mark.parametrize("name", NAMES)
def test_images_from_z_w_and_c_are_the_original_s(name: str, tmp_path: Path) -> None:
    painter, gen = generator(network_pickle(name, tmp_path))
    kept = recorded(name)
    style = gen.mapping(kept["z"].float(), kept["c"] if gen.classes else None)
    assert apart(style, kept["w"]) < CLOSE
    styles = style[:, None].expand(-1, painter.style_count, -1)
    assert apart(truncated(styles, painter.mean, 0.7)[:, 0], kept["w_psi07"]) < CLOSE
    assert apart(truncated(styles, painter.mean, 0.5, 3), kept["ws_psi05_cutoff3"]) < CLOSE
    first = styles[:1]
    assert apart(painter.images(first, Look()), kept["image_psi1_const"]) < CLOSE
    assert apart(painter.images(first, Look(0.7, noise="none")), kept["image_psi07_none"]) < CLOSE
    assert apart(painter.images(first, Look(0.5, 3)), kept["image_cutoff_const"]) < CLOSE
    pixels = as_bytes(painter.images(first, Look(0.7))).permute(0, 2, 3, 1)
    assert int((pixels != kept["image_u8_psi07_const"]).sum()) <= 1


def test_a_seed_s_latent_is_numpy_s(tmp_path: Path) -> None:
    painter, _ = generator(network_pickle("a32", tmp_path))
    assert apart(painter.styles([5], None)[:, 0], painter.styles([4, 5], None)[1:, 0]) < 1e-6
    drawn = recorded("a32")
    assert (
        min(apart(painter.styles([seed], None)[:, 0], drawn["w"][:1]) for seed in range(200))
        < CLOSE
    )


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_original_s_also_of_a_whole_batch_in_its_order(
    name: str, tmp_path: Path
) -> None:
    disc, kept = discriminator(network_pickle(name, tmp_path)), recorded(name)
    real, label = kept["real_u8"].float() / 127.5 - 1, kept["real_c"]
    with torch.no_grad():
        assert apart(disc(real[:4], label[:4])[:, None], kept["logits_real_group"]) < CLOSE
        single = torch.cat([disc(real[i : i + 1], label[i : i + 1]) for i in range(4)])
        assert apart(single[:, None], kept["logits_real_single"]) < CLOSE
        # There the groups of 8 are 0 2 4 6 and 1 3 5 7; here neighbours.
        theirs = torch.arange(8).reshape(4, 2).T.flatten()
        assert (
            apart(
                disc(real[theirs], label[theirs])[theirs.argsort()][:, None], kept["logits_real8"]
            )
            < CLOSE
        )
        assert apart(disc(real, label)[:, None], kept["logits_real8"]) > 1e-5


def test_half_resolutions_are_as_far_from_float32_as_the_original_s(tmp_path: Path) -> None:
    path, kept = network_pickle("b64", tmp_path), recorded("b64")
    half = open_painter(str(path), tmp_path, "cpu", half=True)
    style = half.network.mapping(kept["z"][:1].float(), kept["c"][:1])
    made = half.images(style[:, None].expand(-1, half.style_count, -1), Look())
    # the original's own is 0.020 from float32
    assert 0 < float((made - kept["image_half_const"]).abs().max()) < 0.04


@pytest.mark.parametrize("name", NAMES)
def test_the_running_mean_moves_as_in_the_original(name: str, tmp_path: Path) -> None:
    path, kept = network_pickle(name, tmp_path), recorded(name)
    _, gen = generator(path)
    tensors = read_network_pickle(path).tensors(("G",))
    given = {f"G.{key[2:]}": value for key, value in tensors.items()}
    ours = to_ours(gen.synthesis.resolutions, given)
    gen.load_state_dict({key[4:]: value for key, value in ours.items()})
    gen.mapping.track(kept["z"].float(), kept["c"] if gen.classes else None)
    assert gen.mapping.average is not None
    assert apart(gen.mapping.average, kept["w_avg_after_one_training_pass"]) < CLOSE


@pytest.mark.parametrize(("name", "label"), [("alias_free_t", None), ("alias_free_r", 1)])
def test_images_of_stylegan3_are_the_original_s(
    name: str, label: int | None, tmp_path: Path
) -> None:
    painter = open_painter(str(network_pickle(name, tmp_path)), tmp_path, "cpu")
    kept, styles = recorded(name), painter.styles([0, 1], label)
    assert apart(styles[:, 0], kept["w"]) < CLOSE
    assert apart(painter.images(styles, Look()), kept["image_psi1"]) < CLOSE
    assert apart(painter.images(styles, Look(0.7)), kept["image_psi07"]) < CLOSE


def test_the_text_inside_is_neither_run_nor_needed(tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    text = f"open({str(mark)!r}, 'w')\n".ljust(48, "#").encode()
    data = written("b64")
    start = data.index(b"# source text of training/networks.py")
    line = data[start : data.index(b"\n", start) + 1]
    hostile = tmp_path / "hostile.pkl"
    length = data[start - 4 : start]
    assert int.from_bytes(length, "little") == len(line)
    hostile.write_bytes(data.replace(length + line, len(text).to_bytes(4, "little") + text))
    assert len(read_network_pickle(hostile).tensors()) > 100
    assert not mark.exists()


class Call:
    """Pickled as a call of a name with arguments."""

    def __init__(self, name: Any, *arguments: Any) -> None:
        self.name, self.arguments = name, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.name, self.arguments


def calling(name: str, argument: bytes) -> bytes:
    module, attribute = name.split()
    return (
        pickle.GLOBAL
        + f"{module}\n{attribute}\n".encode()
        + argument
        + pickle.TUPLE1
        + pickle.REDUCE
    )


def module_bytes(state: bytes) -> bytes:
    meta = b"}(" + fragment("class_name") + fragment("Generator") + fragment("state") + state + b"u"
    return calling("torch_utils.persistence _reconstruct_persistent_obj", meta)


def file_of(network: bytes) -> bytes:
    return b"\x80\x03}(" + fragment("G_ema") + network + b"u."


NESTED = calling("torch.storage _load_from_bytes", fragment(pickle.dumps(Call(print, "it ran"))))
DOUBLING = b"}" + b"".join(
    b"q" + bytes([i]) + b"}(K\x01h" + bytes([i]) + b"K\x02h" + bytes([i]) + b"u" for i in range(60)
)
LOOP = (
    b"}q\x01("
    + fragment("_modules")
    + b"}q\x02(" + fragment("a") + module_bytes(b"h\x01") + fragment("b") + module_bytes(b"h\x01") + b"u"
    + b"u"
)  # fmt: skip
HOSTILE = {
    "a program": file_of(calling("os system", fragment("true"))),
    "evaluation": file_of(calling("builtins eval", fragment("1"))),
    "a program in a tensor": file_of(
        module_bytes(b"}(" + fragment("_parameters") + b"}(" + fragment("w") + NESTED + b"uu")
    ),
    "settings that double": file_of(
        module_bytes(b"}(" + fragment("_init_kwargs") + DOUBLING + b"u")
    ),
    "a module in itself": file_of(module_bytes(LOOP)),
    "many bytes": file_of(module_bytes(b"}(" + fragment("w") + b"B\xff\xff\xff\x7f")),
    "no network": b"\x80\x03}(" + fragment("G_ema") + fragment(3) + b"u.",
    "a list": b"\x80\x03]q\x00.",
    "nothing": b"\x80\x03",
    "arguments": file_of(module_bytes(b"}(" + fragment("_init_args") + fragment((1,)) + b"u")),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused_at_once_and_run_nothing(
    kind: str, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "hostile.pkl"
    path.write_bytes(HOSTILE[kind])
    begun = time.process_time()
    with pytest.raises(CheckpointError, match="is refused as a network pickle"):
        read_network_pickle(path).tensors()
    assert time.process_time() - begun < 5
    assert capsys.readouterr().out == ""


def test_the_same_bytes_are_interpreted_once() -> None:
    """Else a short file asks for as much work as it likes."""
    _, (data,) = torch.zeros(3)._typed_storage().__reduce__()
    machine = NetworkMachine(2 * NESTED_WORK)
    machine.do("BINBYTES", data)
    first = machine.storage(data)
    assert all(machine.storage(data) is first for _ in range(1000))
    others = [bytes(bytearray(data)) for _ in range(2)]
    for other in others:
        machine.do("BINBYTES", other)
    machine.spend(-100)  # what the operations cost so far
    machine.storage(others[0])
    with pytest.raises(ValueError, match="too long"):
        machine.storage(others[1])


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    data = written("a32")
    path = tmp_path / "cut.pkl"
    for end in range(100, len(data) - 1, len(data) // 12):
        path.write_bytes(data[:end])
        with pytest.raises(CheckpointError):
            read_network_pickle(path)


def test_other_pickles_are_not_taken_for_one_and_tensorflow_s_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "some.pkl"
    path.write_bytes(pickle.dumps({"G_ema": [1, 2]}))
    assert not is_network_pickle(path)
    assert not is_network_pickle(tmp_path / "none.pkl")
    path.write_bytes(b"\x80\x02cdnnlib.tflib.network\nNetwork\n")
    with pytest.raises(CheckpointError, match="TensorFlow version, which is not read"):
        is_network_pickle(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"synthesis_kwargs": {"architecture": "resnet"}},
            "architecture=resnet, and only architecture=skip",
        ),
        ({"synthesis_kwargs": {"resample_filter": [1, 1]}}, "resample_filter"),
        ({"mapping_kwargs": {"layer_features": 7}}, "several widths"),
        ({"new_kind": 1}, "new_kind, which is not known"),
    ],
)
def test_networks_that_are_built_otherwise_are_refused_with_the_setting(
    change: dict[str, Any], message: str
) -> None:
    plain = {"z_dim": 8, "c_dim": 0, "w_dim": 8, "img_resolution": 16, "img_channels": 3}
    assert settings_of(plain, None, "it")["mapping_layers"] == 8
    with pytest.raises(CheckpointError, match=message):
        settings_of({**plain, **change}, None, "it")
