"""The small file holds what inference needs, in half, and reads back as it was written."""

import errno
import inspect
import json
import os
import shutil

import pytest
import safetensors
import torch

from mpt.commands import convert
from mpt.commands.convert import Command as ConvertArguments
from mpt.errors import CheckpointError, ConfigError, InputOutputError
from mpt.inference import export
from mpt.inference.exported import open_exported
from mpt.inference.inputs import infer_one
from mpt.memory import lora
from mpt.memory.low_bit.formats import NormalFloat4
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import open_run
from mpt.weights.weights_file import load_weights_file
from tests.commands.conftest import GENERATOR, move_adapters, save_better, save_run


def go(run, tmp_path, **changes):
    convert.run(ConvertArguments(run=str(run), runs=str(tmp_path), **{"half": True, **changes}))


def test_why_an_export_failed_is_told_by_its_first_cause_without_colours():
    wrapped = RuntimeError("Failed. \x1b[96mThis is step 1/3\x1b[0m\nAdvice")
    assert export.describe_cause(wrapped) == "RuntimeError: Failed. This is step 1/3"
    wrapped.__cause__ = ValueError("no \x1b[1mloops\x1b[0m.\nmore")
    assert export.describe_cause(wrapped) == "ValueError: no loops"


def test_an_interrupt_that_breaks_the_exporters_own_imports_is_no_failed_export(
    classifier, tmp_path, monkeypatch
):
    """As in torch 2.13: its handler asks for torch._dynamo.exc, which Ctrl-C has left half imported."""
    pytest.importorskip("onnxscript", reason="the exporter needs it")

    def interrupted(*words, **settings):
        try:
            try:
                raise KeyboardInterrupt
            except torch.no_such_module.UserError:
                pass
        except AttributeError as error:
            raise torch.onnx.errors.OnnxExporterError("Failed.") from error

    monkeypatch.setattr(torch.onnx, "export", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(classifier, tmp_path, to="onnx", half=False)
    assert not list(classifier.glob("*partial*"))


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_weights_are_half_but_for_normalisations(classifier, tmp_path, capsys, kind):
    go(classifier, tmp_path, to=kind)
    path = classifier / f"classifier-half.{kind}"
    tensors = load_weights_file(path)
    assert {value.dtype for value in tensors.values()} == {
        torch.float16,
        torch.float32,
        torch.int64,
    }
    assert tensors["net.stages.0.0.weight"].dtype == torch.float16
    assert tensors["net.stages.0.1.running_var"].dtype == torch.float32
    go(classifier, tmp_path, to=kind, half=False)
    full = load_weights_file(classifier / f"classifier.{kind}")
    assert torch.equal(full["net.stages.0.0.weight"].half(), tensors["net.stages.0.0.weight"])
    assert path.stat().st_size < (classifier / f"classifier.{kind}").stat().st_size
    said = capsys.readouterr().out
    assert "reads back as it was written" in said
    assert "over the file that was there" not in said
    there = str(classifier / f"classifier.{kind}")
    with pytest.raises(
        ConfigError, match="is there already; name another with --output, or add --overwrite"
    ):
        go(classifier, tmp_path, half=False, output=there)
    # the suffix says which format
    go(classifier, tmp_path, half=False, output=there, overwrite=True)
    assert f"classifier.{kind} over the file that was there: " in capsys.readouterr().out


def test_the_best_checkpoint_is_written_unless_another_is_asked_for(classifier, tmp_path, capsys):
    save_better(classifier, {2: 0.9, 3: 0.7})
    found = {}
    for wish in ({}, {"best": True}, {"newest": True}, {"step": 1}):
        go(
            classifier,
            tmp_path,
            half=False,
            output=str(tmp_path / "x.safetensors"),
            overwrite=True,
            **wish,
        )
        with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
            about = file.metadata()
        found["".join(wish)] = about["mpt_step"], about.get("mpt_metric")
    assert found == {
        "": ("2", "accuracy 0.9"), "best": ("2", "accuracy 0.9"), "newest": ("3", "accuracy 0.7"), "step": ("1", None)
    }  # fmt: skip
    said = capsys.readouterr().err
    assert "weights of step 2, the best checkpoint (accuracy 0.9); --newest takes step 3\n" in said
    with pytest.raises(ConfigError, match="choose a checkpoint of a run"):
        go(classifier / "checkpoints" / "step-00000002", tmp_path, newest=True)


def test_a_pt_file_is_read_by_torch_without_its_pickle_being_trusted(classifier, tmp_path):
    go(classifier, tmp_path, to="pt")
    content = torch.load(classifier / "classifier-half.pt", weights_only=True)
    assert content["mpt_dtype"] == "float16"
    assert "small_cnn" in content["mpt_config"]


def test_keep_fp32_is_honoured(make_classifier, tmp_path):
    run = make_classifier("precision.keep_fp32=[net.stages.0.0]")
    go(run, tmp_path)
    tensors = load_weights_file(run / "classifier-half.safetensors")
    assert tensors["net.stages.0.0.weight"].dtype == torch.float32
    assert tensors["net.stages.1.0.weight"].dtype == torch.float16


def test_only_what_inference_calls_is_written_with_its_config(generator, tmp_path):
    go(generator, tmp_path, dtype="bfloat16")
    with safetensors.safe_open(generator / "generator-half.safetensors", "pt") as file:
        assert {name.split(".")[0] for name in file.keys()} == {"gen_ema"}  # noqa: SIM118 - it is no mapping
        assert file.metadata()["mpt_dtype"] == "bfloat16"
        assert "dcgan" in file.metadata()["mpt_config"]


@pytest.mark.parametrize(
    ("model", "networks"), [("cvae", {"encoder", "decoder"}), ("aae", {"encoder", "gen"})]
)
def test_the_encoder_that_inputs_are_reconstructed_by_is_written_too(tmp_path, model, networks):
    small = {"name": model, "image_size": 8, "hidden": 8, "latent_size": 4}
    run = save_run(tmp_path, {**GENERATOR, "model": small, "task": {}})
    go(run, tmp_path)
    tensors = load_weights_file(run / "generator-half.safetensors")
    assert {name.split(".")[0] for name in tensors} == networks


def test_a_weight_beyond_float16_is_refused_and_nothing_is_written(tmp_path):
    network = torch.nn.Linear(2, 2)
    with torch.no_grad():
        network.weight.fill_(1e6)
    with pytest.raises(CheckpointError, match="bfloat16"):
        export.write_weights(tmp_path / "x.safetensors", {"net": network.half()}, {})
    export.write_weights(tmp_path / "x.safetensors", {"net": torch.nn.Linear(2, 2).bfloat16()}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_file_that_does_not_read_back_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "load_weights_file", lambda path: {"net.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match="does not read back"):
        export.write_weights(tmp_path / "x.pt", {"net": torch.nn.Linear(2, 2)}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"to": "tflite"}, "--to"),
        ({"dtype": "float32"}, "--dtype"),
        ({"half": False, "dtype": "float16"}, "--dtype"),
        ({"output": "weights.bin"}, "--output"),
        ({"output": "."}, "--output"),
    ],
)
def test_arguments_that_are_none_are_refused(classifier, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        go(classifier, tmp_path, **changes)


def test_onnx_without_its_package_says_what_to_install(classifier, tmp_path, monkeypatch):
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'mpt-trainer\[onnx\]'"):
        go(classifier, tmp_path, to="onnx")


def test_an_onnx_file_computes_what_the_network_does_at_any_batch_size(
    classifier, tmp_path, capsys
):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    go(classifier, tmp_path, to="onnx")
    assert "ONNX Runtime's output differs" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(str(classifier / "classifier-half.onnx"))
    name = session.get_inputs()[0].name
    assert session.run(None, {name: torch.rand(5, 1, 16, 16).numpy()})[0].shape == (5, 10)


def test_an_interrupted_writing_leaves_no_file(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        export.write_weights(
            tmp_path / "x.pt", {"net": torch.nn.Linear(2, 2)}, {"config": json.dumps({})}
        )
    assert not (tmp_path / "x.pt").exists()


def test_a_read_only_folder_is_told_once_and_not_by_the_cleaning_up(
    classifier, tmp_path, monkeypatch
):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system", "somewhere")

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(export.Path, "unlink", refuse)
    with pytest.raises(
        InputOutputError, match="could not be written: the file system is read-only"
    ):
        export.write_weights(classifier / "x.safetensors", {"net": torch.nn.Linear(2, 2)}, {})


def test_a_damaged_checkpoint_that_is_passed_over_is_named_with_the_one_used(
    classifier, tmp_path, capsys
):
    shutil.copytree(
        classifier / "checkpoints" / "step-00000001", classifier / "checkpoints" / "step-00000002"
    )
    go(classifier, tmp_path, to="safetensors")
    said = capsys.readouterr().err
    assert "step-00000002 is refused" in said
    assert "step-00000001 is used instead" in said


@pytest.mark.parametrize("kind", ["safetensors", "onnx"])
def test_adapters_are_added_into_the_weights_of_an_export(make_classifier, tmp_path, kind):
    run = make_classifier("memory.lora={rank: 2, full: []}")
    if kind == "onnx":
        pytest.importorskip("onnxscript", reason="the exporter needs it")
        pytest.importorskip("onnx", reason="the exporter needs it")
        go(run, tmp_path, to="onnx", half=False)
        import onnx

        names = [tensor.name for tensor in onnx.load(run / "classifier.onnx").graph.initializer]
    else:
        go(run, tmp_path, half=False, to=kind)
        names = list(load_weights_file(run / "classifier.safetensors"))
    assert names
    assert not any("lora" in name for name in names)


def test_adapters_alone_are_written_proved_and_begun_from(
    make_classifier, tmp_path, monkeypatch, capsys
):
    run = make_classifier("memory.lora={rank: 2, full: []}")
    move_adapters(run)
    go(run, tmp_path, to="peft", half=False)
    folder = run / "classifier-peft"
    said = capsys.readouterr().out
    assert f"wrote {folder}: " in said
    assert "read back, it computes the same as the run (outputs differ by " in said
    assert sorted(one.name for one in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    again = make_classifier("memory.lora={rank: 2, full: [], weights: " + str(folder) + "}")
    ours, theirs = (checkpoint.load(open_run(one)).state["modules"]["net"] for one in (again, run))
    adapters = [name for name in theirs if name.endswith(("lora_a", "lora_b"))]
    assert adapters
    assert all(torch.equal(ours[name], theirs[name]) for name in adapters)
    with pytest.raises(ConfigError, match="is there already"):
        go(run, tmp_path, to="peft", half=False)
    with pytest.raises(ConfigError, match="no model of diffusers; use --to peft"):
        go(run, tmp_path, to="diffusers", half=False)
    with pytest.raises(ConfigError, match="--half: adapters are written in the dtype"):
        go(run, tmp_path, to="peft")
    monkeypatch.setattr("mpt.inference.adapters.load_adapters", lambda modules, file: "")
    with pytest.raises(CheckpointError, match="computes something else than the run's"):
        go(run, tmp_path, to="peft", half=False, output=str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()
    assert not list(tmp_path.glob("**/.partial*"))


def test_a_packed_base_is_exported_as_it_computed(make_classifier, tmp_path, monkeypatch, capsys):
    run = make_classifier(
        "memory.lora={rank: 2, full: []}", "memory.low_bit_base={format: nf4, keep: []}"
    )
    move_adapters(run)
    go(run, tmp_path, to="safetensors", half=False)
    assert "computes the same as the run (outputs differ by " in capsys.readouterr().out
    tensors = load_weights_file(run / "classifier.safetensors")
    assert not any("lora" in name or "codes" in name for name in tensors)
    go(run, tmp_path, to="peft", half=False)
    assert "read back, it computes the same as the run" in capsys.readouterr().out
    unpack = NormalFloat4.unpack
    monkeypatch.setattr(
        NormalFloat4,
        "unpack",
        lambda *terms: unpack(*terms).flip(0) if is_folding() else unpack(*terms),
    )
    with pytest.raises(CheckpointError, match="computes something else than the run's"):
        go(run, tmp_path, to="safetensors", half=False, output=str(tmp_path / "wrong.safetensors"))


def is_folding() -> bool:
    return any(frame.function == "unpack_all" for frame in inspect.stack())


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_a_packed_base_is_exported_in_half_too(tmp_path, capsys, base):
    """Rounding is that of the weights in the file, which are unpacked and have the adapters in them."""
    shape = {"model": {"name": "vae", "image_size": 8}, "name": "codes"}
    tricks = {"lora": {"rank": 2, "full": []}, "low_bit_base": {"format": base, "keep": []}}
    data = {**GENERATOR, **shape, "task": None, "memory": tricks}
    run = save_run(tmp_path, data)  # adapters that are zero add no rounding of their own
    go(run, tmp_path, to="safetensors", dtype="bfloat16")
    assert "computes the same as the run" in capsys.readouterr().out


def test_a_run_without_adapters_says_so(classifier, tmp_path):
    with pytest.raises(ConfigError, match=r"this run has no adapters \(memory.lora\)"):
        go(classifier, tmp_path, to="kohya", half=False)


@pytest.mark.parametrize(
    ("kind", "half"),
    [
        ("pt", False),
        ("safetensors", True),
        ("onnx", True),
        *(
            pytest.param(kind, half, marks=pytest.mark.slow)
            for kind, half in (("pt", True), ("safetensors", False), ("onnx", False))
        ),
    ],
)
def test_an_export_computes_what_the_run_does_or_is_not_kept(
    make_classifier, tmp_path, kind, half, monkeypatch, capsys
):
    if kind == "onnx":
        pytest.importorskip("onnxscript", reason="the exporter needs it")
        pytest.importorskip("onnxruntime", reason="it runs the file")
    run = make_classifier("memory.lora={rank: 2, full: []}")
    move_adapters(run)
    go(run, tmp_path, to=kind, half=half, dtype="bfloat16" if half and kind != "onnx" else None)
    assert "computes the same as the run (outputs differ by " in capsys.readouterr().out
    fold = lora.Adapted.fold
    # by its own size too much
    monkeypatch.setattr(lora.Adapted, "fold", lambda layer: (fold(layer), fold(layer)))
    with pytest.raises(
        CheckpointError, match=r"net computes something else than the run's.*it was not kept"
    ):
        go(run, tmp_path, to=kind, half=half, output=str(tmp_path / f"wrong.{kind}"))
    assert not list(tmp_path.glob("*wrong*"))


def test_an_export_of_a_pruned_run_is_narrow_and_opens_so(tmp_path):
    run = save_run(tmp_path, GENERATOR, "memory.prune=0.5")
    go(run, tmp_path, half=False, output=str(tmp_path / "narrow.pt"))
    narrow = open_exported(tmp_path / "narrow.pt", "cpu", (), ())
    whole = save_run(tmp_path, GENERATOR, "name=whole")
    go(whole, tmp_path, half=False, output=str(tmp_path / "whole.pt"))
    sizes = [
        sum(value.numel() for value in load_weights_file(tmp_path / f"{name}.pt").values())
        for name in ("narrow", "whole")
    ]
    assert sizes[0] < 0.7 * sizes[1]
    assert infer_one(narrow, (None, 2)).tiles.shape == (2, 1, 16, 16)


def test_a_run_whose_own_outputs_are_not_finite_is_not_called_a_mistake_of_the_export(
    classifier, tmp_path
):
    loaded = checkpoint.load(open_run(classifier))
    loaded.state["modules"]["net"]["head.3.weight"].fill_(3e38)
    checkpoint.save(open_run(classifier), 2, loaded.state, keep_last=9)
    with pytest.raises(CheckpointError, match=r"whose own outputs are not finite .*doctor RUN"):
        go(classifier, tmp_path, half=False, output=str(tmp_path / "wrong.pt"))
    assert not list(tmp_path.glob("*wrong*"))


def test_a_graph_in_a_dtype_that_nothing_here_computes_in_is_refused_before_it_is_written(
    classifier, tmp_path
):
    with pytest.raises(ConfigError, match="--dtype bfloat16: ONNX Runtime does not compute in it"):
        go(classifier, tmp_path, to="onnx", dtype="bfloat16")


def test_a_graph_that_onnx_runtime_does_not_take_is_told_in_one_line(tmp_path):
    onnx = pytest.importorskip("onnx", reason="it writes the graph")
    pytest.importorskip("onnxruntime", reason="it refuses the graph")
    images = onnx.helper.make_tensor_value_info("images", onnx.TensorProto.BFLOAT16, [1])
    made = onnx.helper.make_tensor_value_info("made", onnx.TensorProto.BFLOAT16, [1])
    node = onnx.helper.make_node("Sin", ["images"], ["made"])
    graph = onnx.helper.make_graph([node], "graph", [images], [made])
    path = tmp_path / "sine.onnx"
    onnx.save(onnx.helper.make_model(graph), str(path))
    with pytest.raises(CheckpointError, match=r"sine.onnx: not an ONNX file, damaged, or not for"):
        export.check_onnx(path, torch.nn.Identity(), (torch.zeros(1),))


def test_an_export_with_probabilities_inside_is_proved_too(
    make_classifier, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("onnxscript", reason="the exporter needs it")
    pytest.importorskip("onnxruntime", reason="it runs the file")
    run = make_classifier("memory.lora={rank: 2, full: []}")
    move_adapters(run)
    go(run, tmp_path, to="onnx", half=True, inside=True)
    assert "computes the same as the run (outputs differ by " in capsys.readouterr().out
    fold = lora.Adapted.fold
    monkeypatch.setattr(lora.Adapted, "fold", lambda layer: (fold(layer), fold(layer)))
    with pytest.raises(
        CheckpointError, match=r"computes something else than the run's.*it was not kept"
    ):
        go(run, tmp_path, to="onnx", half=True, inside=True, output=str(tmp_path / "wrong.onnx"))
    assert not list(tmp_path.glob("*wrong*"))
