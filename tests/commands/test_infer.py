"""Inference writes what it made; in half it also says what that gained, and how far it is from float32."""

import csv
import json
import pickle
import shutil
from concurrent.futures import Executor, Future

import numpy
import pytest
import torch
from PIL import Image

from mpt.commands import infer
from mpt.commands.infer import Command as InferArguments
from mpt.errors import CheckpointError, ConfigError, DataError, InputOutputError
from mpt.inference import outputs, slices
from mpt.inference.inputs import SAMPLES
from mpt.memory import lora
from mpt.seams import Inference
from mpt.workflows.inferring import half_compared
from tests.commands.conftest import move_adapters


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures" / "below"
    folder.mkdir(parents=True)
    for index in range(3):
        Image.new("RGB", (20, 24), (80 * index, 10, 200)).save(folder / f"{index}.png")
    (folder / "notes.txt").write_text("no image")
    return tmp_path / "pictures"


def go(run, tmp_path, **changes):
    output = tmp_path / "out"
    infer.run(
        InferArguments(
            run=str(run),
            runs=str(tmp_path),
            device="cpu",
            **{"output": str(output), "overwrite": True, **changes},
        )
    )
    return output


def pixels_of(path):
    with Image.open(path) as picture:
        return numpy.asarray(picture).astype(int)


def read_rows(output):
    with (output / "labels.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_classifier_labels_the_files_below_a_folder(classifier, pictures, tmp_path):
    rows = read_rows(go(classifier, tmp_path, input=(str(pictures),), batch_size=2))
    assert [row["input"].rsplit("/", 1)[1] for row in rows] == ["0.png", "1.png", "2.png"]
    assert all(0 <= float(row["probability"]) <= 1 for row in rows)


def test_the_newest_run_is_taken_where_none_is_named(classifier, tmp_path):
    infer.run(InferArguments(runs=str(tmp_path), output=str(tmp_path / "out"), device="cpu"))
    assert len(read_rows(tmp_path / "out")) == SAMPLES


def test_what_is_printed_of_a_table_is_short_and_named():
    row = {"input": "a.png", "squared_error": 0.25, "code": "0.1 " * 20}
    assert outputs.show_row(row) == "a.png: squared_error 0.25"


def test_a_generator_makes_the_same_samples_each_time(generator, tmp_path):
    first = (go(generator, tmp_path) / "samples.png").read_bytes()
    assert (go(generator, tmp_path) / "samples.png").read_bytes() == first


def test_seed_and_truncation_are_the_users(generator, classifier, tmp_path):
    def pictures(**changes):
        output = go(generator, tmp_path, **changes)
        return [(output / f"{name}.png").read_bytes() for name in ("samples", "truncated")]

    samples, truncated = pictures()
    assert samples != truncated
    assert pictures(truncation=1.0) == [samples, samples]
    assert pictures(seed=5)[0] != samples

    def first_ones(truncation):
        return pixels_of(go(generator, tmp_path, count=2, truncation=truncation) / "samples.png")

    assert not numpy.array_equal(first_ones(0.0), first_ones(1.0))
    with pytest.raises(ConfigError, match=r"task\.truncation: unknown key"):
        go(classifier, tmp_path, truncation=0.5)


def test_a_generator_that_makes_images_from_noise_refuses_inputs(generator, pictures, tmp_path):
    with pytest.raises(ConfigError, match="makes images from noise and takes none"):
        go(generator, tmp_path, input=(str(pictures),))


@pytest.mark.parametrize("option", [{"top": 3}, {"pictures": True}, {"skip_bad": True}])
def test_options_about_inputs_are_refused_where_samples_are_made_from_noise(
    generator, tmp_path, option
):
    with pytest.raises(ConfigError, match="makes samples from noise: leave out --top"):
        go(generator, tmp_path, **option)


def test_the_pictures_of_a_walk_are_refused_without_one(generator, tmp_path):
    with pytest.raises(ConfigError, match="--frames: the pictures of a walk"):
        go(generator, tmp_path, frames=3)


def test_half_states_size_latency_memory_distance_agreement_and_metric(
    classifier, tmp_path, capsys
):
    output = go(classifier, tmp_path, half=True)
    content = json.loads((output / "half.json").read_text())
    assert content["half"]["stored_bytes"] < 0.65 * content["full"]["stored_bytes"]
    assert content["half"]["peak_bytes"] < content["full"]["peak_bytes"]
    assert (
        content["half"]["latency"]["p95_seconds"]
        >= content["half"]["latency"]["median_seconds"]
        > 0
    )
    assert 0 < content["distance"]["mean_error"] <= content["distance"]["max_error"] < 0.1
    assert content["distance"]["decisions"] == SAMPLES
    assert content["distance"]["agreement"] > 0.9
    assert content["metric_name"] == "accuracy"
    assert 0 <= content["full"]["metric"] <= 1
    said = " ".join(capsys.readouterr().out.split())
    assert "size on disk" in said
    assert "decisions agree" in said


def test_half_refuses_adapters_that_are_folded_wrongly(make_classifier, tmp_path, monkeypatch):
    """Both sides of its table have them folded."""
    run = make_classifier("memory.lora={rank: 2, full: []}")
    move_adapters(run)
    go(run, tmp_path, half=True)
    fold = lora.Adapted.fold
    monkeypatch.setattr(lora.Adapted, "fold", lambda layer: (fold(layer), fold(layer)))
    with pytest.raises(
        CheckpointError, match="with its adapters folded computes something else than the run's"
    ):
        go(run, tmp_path, half=True)


def test_half_on_a_cpu_says_what_it_does_instead_of_float16(classifier, tmp_path, capsys):
    go(classifier, tmp_path, half=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "no native" in said
    assert "bfloat16" in said
    go(classifier, tmp_path, half=True, dtype="float16")
    assert "slower than float32" in " ".join(capsys.readouterr().out.split())


def test_half_on_a_cpu_opens_no_context_on_a_gpu(monkeypatch):
    touched = []
    monkeypatch.setattr(torch.accelerator, "synchronize", touched.append)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: touched.append("cache"))
    half_compared.release(torch.device("cpu"))
    assert touched == []
    half_compared.release(torch.device("cuda:1"))
    assert touched == [torch.device("cuda:1"), "cache"]


def test_half_warns_of_dimensions_that_are_no_multiple_of_eight(classifier, tmp_path, capsys):
    output = go(classifier, tmp_path, half=True, count=3)
    assert len(read_rows(output)) == 3  # --count holds here too
    said = " ".join(capsys.readouterr().out.split())
    assert "no multiple of 8" in said
    assert "out 10" in said


def test_half_samples_of_a_generator_come_from_its_average(generator, tmp_path):
    content = json.loads((go(generator, tmp_path, half=True) / "half.json").read_text())
    assert any(name.startswith("gen_ema") for name in content["awkward"])
    assert not any(name.startswith("disc") for name in content["awkward"])
    assert content["distance"]["agreement"] is None


def test_dtype_without_half_changes_the_arithmetic_alone(classifier, tmp_path):
    full = read_rows(go(classifier, tmp_path, dtype="float32"))
    half = read_rows(go(classifier, tmp_path, dtype="bfloat16"))
    assert full == read_rows(go(classifier, tmp_path))
    assert [row["probability"] for row in full] != [row["probability"] for row in half]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype": "int8"}, ConfigError, "--dtype"),
        ({"dtype": "float32", "half": True}, ConfigError, "--dtype"),
        ({"batch_size": 0}, ConfigError, "--batch-size"),
        ({"input": ("/nowhere",)}, DataError, "--input"),
    ],
)
def test_arguments_that_are_none_are_refused(classifier, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        go(classifier, tmp_path, **changes)


def test_a_folder_without_images_and_a_corrupt_image_are_refused_by_name(
    classifier, pictures, tmp_path
):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no images"):
        go(classifier, tmp_path, input=(str(tmp_path / "empty"),))
    (pictures / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    bad = r"--input: .*broken\.png: .*\. Leave this file out, or add --skip-bad$"
    with pytest.raises(DataError, match=bad):
        go(classifier, tmp_path, input=(str(pictures),))


def test_an_inference_that_fails_leaves_no_empty_folder(classifier, pictures, tmp_path):
    (pictures / "broken.png").write_bytes(b"no image")
    for output in (None, str(tmp_path / "new" / "below")):
        with pytest.raises(DataError, match="Leave this file out"):
            go(classifier, tmp_path, input=(str(pictures),), output=output)
    assert not (classifier / "inference").exists()
    assert not (tmp_path / "new").exists()
    (tmp_path / "own").mkdir()
    with pytest.raises(DataError, match="Leave this file out"):
        go(classifier, tmp_path, input=(str(pictures),), output=str(tmp_path / "own"))
    assert (tmp_path / "own").is_dir()  # the user's


def test_a_file_in_place_of_the_folder_is_named_as_that(classifier, tmp_path):
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(ConfigError, match=r"mine\.yaml is a file; name a folder, a table \(\.csv"):
        go(classifier, tmp_path, output=str(tmp_path / "mine.yaml"))


def test_label_and_probability_below_a_picture_are_apart():
    assert outputs.caption_of({"label": "cat", "probability": 0.7777}) == "cat: 0.7777"
    assert outputs.caption_of({"label": "cat"}) == "cat"
    wrong = {"label": "a" * 20, "probability": 0.5, "truth": "dog"}
    assert outputs.caption_of(wrong) == "a" * 14 + ": 0.5\n(true: dog)"


def test_many_pictures_are_said_in_one_line(tmp_path):
    output = outputs.choose_output(str(tmp_path), False, tmp_path)
    figures = {f"{kind}-{n:04d}": torch.zeros(1, 3, 2, 2) for n in range(32) for kind in ("a", "b")}
    said = outputs.write([Inference(figures=figures)], [], output, [])
    assert said == [
        f"wrote 64 pictures to {tmp_path}: a-0000.png, b-0000.png, a-0001.png and 61 more"
    ]
    assert len(list(tmp_path.iterdir())) == 64
    few = dict(list(figures.items())[:2])
    said = outputs.write([Inference(figures=few)], [], output, [])
    assert said == [f"wrote {tmp_path / 'a-0000.png'}", f"wrote {tmp_path / 'b-0000.png'}"]


def test_a_run_that_is_not_there_or_has_no_checkpoint_is_refused(classifier, tmp_path):
    with pytest.raises(CheckpointError, match="absent"):
        go("absent", tmp_path)
    for step in (classifier / "checkpoints").iterdir():
        step.rename(tmp_path / step.name)
    with pytest.raises(CheckpointError):
        go(classifier, tmp_path)


def test_an_output_folder_that_cannot_be_made_is_refused_before_anything_is_computed(
    classifier, tmp_path
):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputOutputError, match="--output"):
        go(classifier, tmp_path, output=str(tmp_path / "file" / "below"))


def test_torch_s_random_numbers_are_left_alone(generator, tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    go(generator, tmp_path)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), expected)


def test_inference_needs_neither_the_optimizer_nor_its_packages(
    make_classifier, tmp_path, monkeypatch
):
    run = make_classifier("precision.mode=O2", "memory.channels_last=true")
    config = run / "config.yaml"
    config.write_text(
        config.read_text().replace(
            "channels_last: true", "low_bit_optimizer: {backend: bitsandbytes}"
        )
    )
    assert "low_bit_optimizer" in config.read_text()
    monkeypatch.setattr(torch.optim.Adam, "__init__", None)
    assert len(read_rows(go(run, tmp_path))) == SAMPLES


def test_a_damaged_checkpoint_that_is_passed_over_is_named_with_the_one_used(
    classifier, tmp_path, capsys
):
    shutil.copytree(
        classifier / "checkpoints" / "step-00000001", classifier / "checkpoints" / "step-00000002"
    )
    go(classifier, tmp_path)
    said = capsys.readouterr().err
    assert "step-00000002 is refused" in said
    assert "step-00000001 is used instead" in said


def test_further_labels_or_all_probabilities_are_told_beside_the_truth(
    classifier, tmp_path, capsys
):
    rows = read_rows(go(classifier, tmp_path, top=3, count=5))
    assert len(rows) == 5
    assert list(rows[0]) == [
        "input",
        *("label", "probability", "truth"),
        *("label_2", "probability_2"),
        "label_3",
        "probability_3",
    ]
    assert all(row["input"].startswith("test sample ") for row in rows)
    assert (
        float(rows[0]["probability"])
        >= float(rows[0]["probability_2"])
        >= float(rows[0]["probability_3"])
    )
    right = sum(row["label"] == row["truth"] for row in rows)
    said = capsys.readouterr().out
    assert f"{right} of 5 labels are the true ones" in said
    assert "per second" in said
    every = read_rows(go(classifier, tmp_path, top=0, count=2))
    assert sum(float(every[0][f"p({digit})"]) for digit in range(10)) == pytest.approx(1, abs=1e-4)


def test_test_samples_of_a_folder_are_named_by_their_files(make_classifier, tmp_path):
    for index in range(20):
        path = tmp_path / "images" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), 10 * index).save(path)
    data = f"dataset={{name: image_folder, root: {tmp_path / 'images'}, test_fraction: 0.5, channels: 1}}"
    rows = read_rows(go(make_classifier("dataset=null", data), tmp_path))
    assert rows
    assert all(row["truth"] == row["input"].split("/")[-2] for row in rows)


def test_bad_inputs_are_left_out_and_listed_where_that_is_wanted(
    classifier, pictures, tmp_path, capsys
):
    (pictures / "below" / "1.png").write_text("no picture")
    with pytest.raises(DataError, match=r"1\.png"):
        go(classifier, tmp_path, input=(str(pictures),))
    output = go(classifier, tmp_path, input=(str(pictures),), skip_bad=True)
    assert [row["input"].rsplit("/", 1)[1] for row in read_rows(output)] == ["0.png", "2.png"]
    with (output / "skipped.csv").open() as file:
        assert [(row["input"], row["reason"][:12]) for row in csv.DictReader(file)] == [
            (str(pictures / "below" / "1.png"), "not an image")
        ]
    assert "left out 1 bad input, listed in" in capsys.readouterr().out
    (tmp_path / "skipped.csv").write_text("another's")
    named = InferArguments(run=str(classifier), device="cpu", input=(str(pictures),), skip_bad=True, pictures=True,
                           output=str(tmp_path / "mine.csv"))  # fmt: skip
    infer.run(named)
    assert (tmp_path / "skipped.csv").read_text() == "another's"
    assert {path.name for path in tmp_path.glob("mine*")} == {
        "mine.csv",
        "mine-skipped.csv",
        "mine-labels.png",
    }


def test_nothing_is_written_over_without_a_word(classifier, tmp_path):
    for expected in ("inference", "inference-2"):
        infer.run(InferArguments(run=str(classifier), device="cpu", count=2))
        assert (classifier / expected / "labels.csv").is_file()
    table = tmp_path / "table.csv"
    infer.run(InferArguments(run=str(classifier), device="cpu", count=2, output=str(table)))
    before = table.read_text()
    assert before.startswith("input,label,probability,truth\n")
    with pytest.raises(ConfigError, match=r"table.csv is there already; .*--overwrite"):
        infer.run(InferArguments(run=str(classifier), device="cpu", count=3, output=str(table)))
    assert table.read_text() == before
    infer.run(
        InferArguments(
            run=str(classifier), device="cpu", count=3, output=str(table), overwrite=True
        )
    )
    assert len(table.read_text().splitlines()) == 4


def test_a_generator_makes_any_number_of_samples_single_files_and_ways_between_seeds(
    generator, tmp_path
):
    output = go(generator, tmp_path, count=5, single=True, walk="3:17:3", frames=4, batch_size=2)
    files = sorted(output.glob("sample-*.png"))
    assert [file.name for file in files] == [f"sample-{number:04d}.png" for number in range(5)]
    assert pixels_of(files[0]).shape[:2] == (16, 16)
    again = go(
        generator, tmp_path, count=5, single=True, output=str(tmp_path / "again"), batch_size=5
    )
    for file in files:
        assert abs(pixels_of(file) - pixels_of(again / file.name)).max() <= 1, (
            "a sample depends on its number, not on the batch"
        )
    with Image.open(output / "walk.gif") as movie:
        assert movie.n_frames == 7, "the seed in the middle is one frame"
        first = numpy.asarray(movie.convert("RGB"))
        movie.seek(6)
        # back at the first seed
        assert abs(first.astype(int) - numpy.asarray(movie.convert("RGB"))).max() <= 8
    for wrong in ("3", "a:b", "3:"):
        with pytest.raises(ConfigError, match="--walk"):
            go(generator, tmp_path, walk=wrong)


def test_count_takes_the_first_inputs_and_what_is_for_noise_is_refused_at_once(
    classifier, pictures, tmp_path
):
    output = go(classifier, tmp_path, input=(str(pictures),), count=2)
    assert len((output / "labels.csv").read_text().splitlines()) == 3
    for wrong in ({"walk": "1:2"}, {"single": True}):
        with pytest.raises(ConfigError, match="no samples from noise"):
            go(classifier, tmp_path, output=str(tmp_path / "none"), **wrong)
    assert not (tmp_path / "none").exists()


def test_pictures_show_inputs_with_their_labels(classifier, tmp_path):
    pixels = pixels_of(go(classifier, tmp_path, pictures=True, count=10) / "labels.png")
    assert pixels.shape[1] > 8 * 128
    assert (pixels[..., 0] - pixels[..., 1]).max() > 100, "a wrong label is red"


def test_the_newest_finished_run_is_taken_and_a_newer_unfinished_one_is_named(
    make_classifier, tmp_path, capsys
):
    old, new = make_classifier("name=old"), make_classifier("name=new")
    infer.run(InferArguments(runs=str(tmp_path), device="cpu", count=1))
    assert "no run in" in capsys.readouterr().err
    assert (new / "inference").is_dir()
    (old / "summary.json").write_text(json.dumps({"steps": 1}))
    infer.run(InferArguments(runs=str(tmp_path), device="cpu", count=1))
    assert f"{new} is newer and not finished; {old} is taken" in capsys.readouterr().err
    shutil.rmtree(old)
    shutil.rmtree(new / "checkpoints")
    (new / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="has a checkpoint yet"):
        infer.run(InferArguments(runs=str(tmp_path), device="cpu"))


class AtOnce(Executor):
    """A pool of processes whose work is done in this one."""

    def __init__(self, *_):
        pass

    def submit(self, function, /, *args, **kwargs):
        done = Future()
        work, *rest = pickle.loads(pickle.dumps(args))  # as a process would be told
        done.set_result(function(work, *rest, **kwargs))
        return done


def test_several_processes_write_what_one_writes(
    classifier, generator, pictures, tmp_path, monkeypatch
):
    monkeypatch.setattr(slices, "ProcessPoolExecutor", AtOnce)
    for run, options, name in (
        (classifier, {"count": 7, "batch_size": 2, "top": 0}, "labels.csv"),
        (
            classifier,
            {"input": (str(pictures),), "batch_size": 1, "dtype": "bfloat16"},
            "labels.csv",
        ),
        (generator, {"count": 7, "batch_size": 3}, "samples.png"),
    ):
        written = [
            (go(run, tmp_path, nproc=count, **options) / name).read_bytes() for count in (1, 3)
        ]
        assert written[0] == written[1]


@pytest.mark.slow
def test_processes_of_their_own_write_what_one_writes(generator, tmp_path, capsys):
    written = [
        (go(generator, tmp_path, nproc=n, count=7, batch_size=3) / "samples.png").read_bytes()
        for n in (1, 2)
    ]
    assert written[0] == written[1]


def test_what_several_processes_cannot_do_is_refused(classifier, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="--half: it compares two precisions on one card"):
        go(classifier, tmp_path, nproc=2, half=True)
    with pytest.raises(ConfigError, match="found 'cuda:1' for 2 processes"):
        slices.choose_devices("cuda:1", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert slices.choose_devices(None, 2) == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match=r"found 3 processes for 2 CUDA device\(s\); use 2"):
        slices.choose_devices("auto", 3)


@pytest.mark.parametrize("name", ["out.json", "out.txt", "OUT.JPG"])
def test_an_output_that_would_become_a_folder_of_a_file_s_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"{name} is no table \(\.csv\)"):
        outputs.choose_output(str(tmp_path / name), False, tmp_path)
    assert not (tmp_path / name).exists()
