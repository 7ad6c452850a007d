"""An exported file says what it is, and `mpt infer` of it alone agrees with the run it came from."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import PIL.ImageOps
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from mpt.commands import convert, infer
from mpt.commands.convert import Command as ConvertArguments
from mpt.commands.infer import Command as InferArguments
from mpt.data.pictures.decoding import decode_bytes
from mpt.errors import CheckpointError, ConfigError
from mpt.inference.exported import described_fit, refuse_absent_networks, run_in_batches
from mpt.inference.inputs import read_image
from mpt.seams.task import Task


def export(run: Path, tmp_path: Path, name: str, **changes: Any) -> Path:
    path = tmp_path / name
    to = path.suffix.removeprefix(".")
    convert.run(
        ConvertArguments(run=str(run), runs=str(tmp_path), to=to, output=str(path), **changes)
    )
    return path


def infer_with(what: Path, tmp_path: Path, **changes: Any) -> Path:
    output = tmp_path / f"out-{what.name.replace('.', '-')}"
    infer.run(
        InferArguments(
            run=str(what), runs=str(tmp_path), device="cpu", output=str(output), **changes
        )
    )
    return output


def labels(output: Path) -> list[tuple[str, float]]:
    with (output / "labels.csv").open() as file:
        return [(row["label"], float(row["probability"])) for row in csv.DictReader(file)]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    generator = numpy.random.default_rng(0)
    for index in range(3):
        pixels = generator.integers(0, 255, (20, 32 + index, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain.safetensors", {}),
        ("half.pt", {"half": True}),
        ("plain.onnx", {}),
        ("inside.onnx", {"inside": True}),
    ],
)
def test_an_export_alone_labels_pictures_as_its_run_does(
    make_classifier: Any, tmp_path: Path, pictures: Path, name: str, options: dict[str, Any]
) -> None:
    if name.endswith(".onnx"):
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason="ONNX files are written and run with it")
    run = make_classifier(
        "task={ema: 0.9, mean: [0.3], std: [0.2]}", "memory={lora: {rank: 2, full: []}}"
    )
    expected = labels(infer_with(run, tmp_path, input=(str(pictures),)))
    path = export(run, tmp_path, name, **options)
    alone = tmp_path / "elsewhere" / name
    alone.parent.mkdir()
    path.rename(alone)
    found = labels(infer_with(alone, tmp_path, input=(str(pictures),)))
    assert [label for label, _ in found] == [label for label, _ in expected]
    tolerance = 5e-3 if options.get("half") else 2e-4
    assert [p for _, p in found] == pytest.approx([p for _, p in expected], abs=tolerance)


def test_a_generator_s_export_makes_its_samples(generator: Path, tmp_path: Path) -> None:
    expected = Image.open(infer_with(generator, tmp_path, dtype="float32") / "samples.png")
    path = export(generator, tmp_path, "gen.pt")
    found = Image.open(infer_with(path, tmp_path) / "samples.png")
    assert (
        numpy.abs(numpy.asarray(expected).astype(int) - numpy.asarray(found).astype(int)).max() <= 1
    )


def test_metadata_holds_what_a_program_needs_to_use_the_file(
    classifier: Path, tmp_path: Path
) -> None:
    with safe_open(export(classifier, tmp_path, "e.safetensors"), "pt") as file:
        about = file.metadata()
    assert json.loads(about["mpt_classes"]) == [str(digit) for digit in range(10)]
    assert json.loads(about["mpt_mean"]) == [0.5]
    assert json.loads(about["mpt_input_sizes"]) == {"image": [1, 16, 16]}
    assert about["mpt_fit"].startswith("crop: the largest centred part")
    # the rule to the pixel
    assert "PIL.ImageOps.fit(picture, (width, height), BILINEAR)" in about["mpt_fit"]
    pytest.importorskip("onnxscript", reason="the exporter needs it")
    onnx = pytest.importorskip("onnx", reason="the exporter needs it")
    model = onnx.load(export(classifier, tmp_path, "e.onnx", inside=True))
    assert [tensor.name for tensor in model.graph.input] == ["images"]
    assert [tensor.name for tensor in model.graph.output] == ["probabilities"]
    assert next(axis.dim_param for axis in model.graph.input[0].type.tensor_type.shape.dim)
    assert {prop.key: prop.value for prop in model.metadata_props}["mpt_classes"] == about[
        "mpt_classes"
    ]


def test_files_that_say_too_little_or_another_thing_are_refused(
    classifier: Path, tmp_path: Path
) -> None:
    strange = tmp_path / "strange.safetensors"
    save_file({"w": torch.ones(2)}, strange)
    with pytest.raises(CheckpointError, match="its metadata are missing"):
        infer_with(strange, tmp_path)
    (tmp_path / "net.pt2").touch()
    with pytest.raises(
        CheckpointError, match=r"a file that `mpt convert` wrote \(\.onnx, \.safetensors, \.pt\)"
    ):
        infer_with(tmp_path / "net.pt2", tmp_path)
    path = export(classifier, tmp_path, "e.safetensors")
    with safe_open(path, "pt") as file:
        about = file.metadata()
    save_file({"net.w": torch.ones(2)}, strange, metadata=about)
    with pytest.raises(CheckpointError, match="its tensors are not those of its configuration"):
        infer_with(strange, tmp_path)
    strange.write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        infer_with(strange, tmp_path)
    with pytest.raises(ConfigError, match="taken as it is"):
        infer_with(path, tmp_path, half=True)
    with pytest.raises(ConfigError, match="only --to onnx"):
        export(classifier, tmp_path, "f.safetensors", inside=True)


def test_a_network_that_an_export_does_not_hold_is_not_called_with_random_weights() -> None:
    task, modules = Task(), {name: torch.nn.Linear(2, 2) for name in ("encoder", "decoder")}
    task.modules = dict(modules)
    refuse_absent_networks(Path("v.onnx"), task, ["decoder"])
    assert modules["decoder"](torch.ones(1, 2)).shape == (1, 2)
    with pytest.raises(CheckpointError, match="it holds decoder alone, and this needs encoder too"):
        modules["encoder"](torch.ones(1, 2))


def test_files_are_looked_at_as_the_test_set_is_and_an_export_says_so(tmp_path: Path) -> None:
    settings = SimpleNamespace(model_dump=lambda: {"fit": "crop", "test_share": 0.875})
    trained = SimpleNamespace(
        config=SimpleNamespace(dataset=SimpleNamespace(settings=settings)),
        run=SimpleNamespace(
            data=SimpleNamespace(fields={"image": SimpleNamespace(shape=(3, 8, 8))})
        ),
    )
    pixels = numpy.random.default_rng(0).integers(0, 255, (40, 30, 3), dtype=numpy.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    found = read_image(trained, "image", path)
    said = described_fit("crop", 0.875)
    call = said[said.index("PIL.ImageOps.fit") :]
    assert call == "PIL.ImageOps.fit(picture, (width, height), BILINEAR, bleed=0.0625)"
    names = {"PIL": PIL, "picture": Image.open(path), "width": 8, "height": 8}
    wanted = eval(call, {**names, "BILINEAR": Image.Resampling.BILINEAR})
    assert numpy.array_equal(numpy.array(wanted).transpose(2, 0, 1), found.numpy())
    assert not torch.equal(found, decode_bytes(path, 3, (8, 8), 10**6))


def test_three_ways_of_making_a_picture_square(tmp_path: Path) -> None:
    pixels = numpy.zeros((4, 8, 3), dtype=numpy.uint8)
    # red in the middle, green at both ends
    pixels[:, 2:6, 0], pixels[:, :2, 1], pixels[:, 6:, 1] = 255, 255, 255
    path = tmp_path / "wide.png"
    Image.fromarray(pixels).save(path)
    red, green = (slice(None), 4, 4), (slice(None), 4, 0)
    crop, letterbox, stretch = (
        decode_bytes(path, 3, (8, 8), 10**6, fit) for fit in ("crop", "letterbox", "stretch")
    )
    assert crop[red].tolist() == letterbox[red].tolist() == stretch[red].tolist() == [255, 0, 0]
    assert crop[green][0] > 128  # its edge is filtered with what lies outside
    assert letterbox[green].tolist() == stretch[green].tolist() == [0, 255, 0]
    assert letterbox[:, 0].eq(0).all()
    assert stretch[:, 0, 0].tolist() == [0, 255, 0]


def test_a_generator_s_onnx_file_makes_the_samples_that_were_asked_for(
    generator: Path, tmp_path: Path
) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="the exporter needs it")
    runtime = pytest.importorskip("onnxruntime", reason="the file is run with it")
    path = export(generator, tmp_path, "gen.onnx")
    asked = {"count": 3, "seed": 5, "single": True}
    expected, found = (
        infer_with(what, tmp_path, **asked, **changes)
        for what, changes in ((generator, {"dtype": "float32"}), (path, {}))
    )
    for name in ("samples.png", "sample-0002.png"):
        pixels = [
            numpy.asarray(Image.open(folder / name)).astype(int) for folder in (expected, found)
        ]
        assert numpy.abs(pixels[0] - pixels[1]).max() <= 1
    assert not (found / "sample-0003.png").exists()
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["mpt_latents"]) == {"size": 8, "prior": "normal"}
    made = session.run(None, {"latents": numpy.zeros((2, 8), "float32")})[0]
    low, high = json.loads(about["mpt_image_range"])
    assert made.min() >= low
    assert made.max() <= high


def test_a_node_that_onnx_runtime_cannot_compute_is_told_in_a_line() -> None:
    pytest.importorskip("onnxruntime")
    from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException

    def run(names: Any, feeds: Any) -> Any:
        raise RuntimeException("6 : no kernel for MLFloat16\nmore")

    slot = SimpleNamespace(name="x", shape=["batch", 2])
    session = SimpleNamespace(get_inputs=lambda: [slot], run=run)
    with pytest.raises(CheckpointError, match="cannot compute this graph: 6 : no kernel"):
        run_in_batches(session, {"x": numpy.zeros((1, 2))})
