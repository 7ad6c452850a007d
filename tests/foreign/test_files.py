"""Whatever stands where a file of others is expected, it is read whole and bounded or refused at once."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpt import cli
from mpt.config.finding.part_packages import use_parts
from mpt.config.finding.registry import INSTALLED
from mpt.errors import CheckpointError, DataError, MptError, PartError
from mpt.foreign import files
from mpt.report.reading.read_run import read_outline, read_run
from mpt.run.records.ending import read_json_object
from mpt.run.records.recorder import read_lines as read_records
from mpt.systems.deepfacelab.commands.shared.model_folder import Folder
from mpt.systems.deepfacelab.data.faces.face_files import list_faces
from mpt.systems.deepfacelab.data.leras.model_data import read_model_data
from tests.deadlines import deadline

SPARSE_BYTES = 3 << 30


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


UNFIT = [make_pipe, make_device_link, make_sparse]


@contextlib.contextmanager
def little(seconds: float = 10, more_bytes: int = 1 << 30) -> Iterator[None]:
    """Fail where the block takes longer, or a gibibyte more than is used already."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, limits[1]))
    try:
        with deadline(seconds):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("make", UNFIT)
@pytest.mark.parametrize("read", [files.read_bytes, files.read_text, files.read_json])
def test_what_is_no_file_of_its_size_is_an_error_with_a_reason(
    tmp_path: Path, make: Callable[[Path], None], read: Callable[[Path, int], Any]
) -> None:
    make(tmp_path / "x")
    with (
        little(),
        pytest.raises(files.UnfitFileError, match=r"not a regular file|larger than the 1000 bytes"),
    ):
        read(tmp_path / "x", 1000)


def test_the_mark_that_notepad_writes_before_a_text_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf0 .5 .5 .2 .2\r\n")
    assert files.read_text(tmp_path / "a.txt", 100) == "0 .5 .5 .2 .2\n"


def test_files_are_read_behind_links_and_with_any_line_ends(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b'{"a":\r\n1}\r')
    (tmp_path / "link").symlink_to("x")
    assert files.read_text(tmp_path / "link", 100) == '{"a":\n1}\n'
    assert files.read_json(tmp_path / "link") == {"a": 1}
    with pytest.raises(files.UnfitFileError, match="larger than the 9 bytes"):
        files.read_bytes(tmp_path / "x", 9)
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nests too deep"):
        files.read_json(tmp_path / "deep")


def test_a_file_without_a_size_is_bounded_too() -> None:
    """Files in /proc have none, and a file may grow after it was opened."""
    with pytest.raises(files.UnfitFileError, match="larger than the 10 bytes"):
        files.read_bytes(Path("/proc/cpuinfo"), 10)


def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_whole(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"one\n" + b"x" * 100 + b"\ntwo\nhalf")
    assert list(files.read_lines(tmp_path / "x", 10)) == [b"one\n", b"x" * 10, b"two\n", b"half"]


def look_for_parts() -> None:
    INSTALLED.functions("losses")
    INSTALLED.check("nn")
    for _, _, error in INSTALLED.wrong_commands():
        raise error


@pytest.mark.parametrize("make", UNFIT)
@pytest.mark.parametrize("folder", ["nn", "commands", "losses"])
def test_a_parts_folder_with_no_file_in_it_is_refused_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], None],
    folder: str,
) -> None:
    monkeypatch.setenv("MPT_PARTS", "")
    (tmp_path / "parts" / folder).mkdir(parents=True)
    make(tmp_path / "parts" / folder / "x.py")
    use_parts([tmp_path / "parts"])
    with (
        little(),
        pytest.raises(PartError, match=r"x.py: cannot be read: (not a regular file|larger than)"),
    ):
        look_for_parts()
    if folder != "losses":
        words = {"nn": ["list", "models"], "commands": ["x"]}[folder]  # what uses such a file
        with little(), pytest.raises(SystemExit) as ended:
            cli.main([*words, "--parts", str(tmp_path / "parts")])
        assert ended.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("make", UNFIT)
@pytest.mark.parametrize(
    "name", ["summary.json", "config.yaml", "metrics.jsonl", "env.json", "plan.json"]
)
def test_no_file_of_another_run_stops_a_report(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "metrics.jsonl").write_text('{"kind":"train","step":1}\n')
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with little(30):
        read_run(tmp_path)
        read_outline(tmp_path)
        read_json_object(tmp_path / name)
        with contextlib.suppress(MptError):
            list(read_records(tmp_path / name))


@pytest.mark.parametrize("make", UNFIT)
def test_deepfacelab_s_files_are_refused_where_they_are_none(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / "faces").mkdir()
    make(tmp_path / "faces" / "1.jpg")
    make(tmp_path / "data.dat")
    with little(), pytest.raises(CheckpointError, match="cannot be read"):
        read_model_data(tmp_path / "data.dat")
    with little(), pytest.raises(DataError, match="cannot be read"):
        list_faces(tmp_path / "faces", "src")


def test_a_record_that_is_whole_is_read(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 3}))
    assert read_json_object(tmp_path / "summary.json") == {"steps": 3}
    (tmp_path / "link.json").symlink_to("summary.json")
    assert read_json_object(tmp_path / "link.json") == {}


@pytest.mark.parametrize("make", UNFIT)
def test_options_that_are_no_file_are_not_taken_for_absent(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "new_SAEHD_data.dat")
    with little(), pytest.raises(CheckpointError, match="cannot be read"):
        Folder(tmp_path, "new_SAEHD_").read_data()
