"""Videos, folders and pictures made smoother, with networks that are not trained: their frames are the mean."""

from fractions import Fraction
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor

from mpt.errors import ConfigError, DataError, MemoryBudgetError
from mpt.planner.facts.calibration import load_calibration
from mpt.systems.dain.inference import tiles
from mpt.systems.dain.inference.interpolate import Detection, Job, Maker, Summary, interpolate
from mpt.systems.dain.inference.memory import choose_tiles, pass_memory, room_of
from mpt.systems.dain.inference.output import SEGMENT, Film, Output, Place, open_output
from mpt.systems.dain.inference.source import FrameStream, open_source
from mpt.systems.dain.inference.tiles import (
    TileDifference,
    grid_of_tiles,
    seam_error,
    spans_of,
    tiled,
    whole,
)
from mpt.systems.dain.inference.timeline import Pace, Shown
from mpt.systems.dain.nn.flow_warp import FlowWarp


@pytest.fixture
def net() -> FlowWarp:
    torch.manual_seed(0)
    return FlowWarp([4, 8, 8]).eval()


def maker_of(net: FlowWarp, source: FrameStream) -> Maker:
    grid = grid_of_tiles(source.height, source.width, (source.height, source.width), 2 * net.margin)
    return Maker(net, torch.device("cpu"), grid, 2 * net.margin)


def pictures(folder: Path, count: int, size: tuple[int, int] = (40, 24)) -> Path:
    """Write grey pictures that brighten by 10, numbered from 7."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("RGB", size, (10 * number,) * 3).save(folder / f"shot{number + 7:03d}.png")
    return folder


def run_through(source: FrameStream, target: Fraction, net: FlowWarp, output: Output) -> Summary:
    with torch.no_grad():
        return interpolate(
            source,
            Pace(rate=target),
            maker_of(net, source),
            output,
            detection=Detection(0),
            tell=False,
        )


def levels(folder: Path) -> list[float]:
    files = sorted(folder.glob("frame-*.png"))
    return [float(Image.open(file).getpixel((5, 5))[0]) for file in files]  # type: ignore[index]


def test_the_output_lasts_as_long_as_the_input_and_keeps_its_frames():
    for rate, target in ((25, 50), (25, 200), (24, 60), (Fraction(30000, 1001), 60)):
        pace, step = Pace(rate=Fraction(target)), 1 / Fraction(rate)
        pairs = [pace.between(index * step, (index + 1) * step) for index in range(48)]
        assert abs(sum(map(len, pairs)) / Fraction(target) - 48 * step) < 1 / Fraction(target)
        assert all(0 <= one.moment < 1 for shown in pairs for one in shown)
        most = max(sum(one.moment > 0 for one in shown) for shown in pairs)
        assert most <= pace.most_between(step) < Fraction(target) * step + 1


def test_uneven_times_are_divided_each_by_themselves_and_slow_motion_lasts_longer():
    pace = Pace(factor=2, slow=Fraction(3))
    assert [one.seconds for one in pace.between(Fraction(1, 10), Fraction(1, 2))] == [
        Fraction(3, 10),
        Fraction(9, 10),
    ]
    even = Pace(rate=Fraction(10)).between(Fraction(1, 10), Fraction(1, 2))
    assert [float(one.moment) for one in even] == [0, 0.25, 0.5, 0.75]
    assert Pace(rate=Fraction(10)).between(Fraction(11, 100), Fraction(19, 100)) == ()
    # three repeats are interpolated over
    assert Pace(3).most_between(Fraction(1), intervals=4) == 11


def test_over_repeats_moments_are_of_the_whole_interval_and_times_of_each():
    shown = Pace(2).over([Fraction(0), Fraction(1), Fraction(4)])
    assert [one.seconds for one in shown] == [0, Fraction(1, 2), 1, Fraction(5, 2)]
    assert [one.moment for one in shown] == [0, Fraction(1, 8), Fraction(1, 4), Fraction(5, 8)]


def test_a_folder_becomes_twice_and_four_times_as_many_frames(tmp_path, net):
    source = open_source([pictures(tmp_path / "in", 4)])
    for factor in (2, 4):
        out = tmp_path / f"x{factor}"
        output = open_output(out, Film(source.rate * factor), {})
        summary = run_through(source, source.rate * factor, net, output)
        output.finish()
        assert (summary.read, summary.made, summary.written) == (4, 3 * (factor - 1), 4 * factor)
        found = levels(out)
        assert found[::factor] == [0, 10, 20, 30]
        assert found[factor // 2] == 5  # halfway between 0 and 10
        assert found[-factor:] == [30] * factor  # the last frame is repeated
        assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_frames_of_two_scenes_are_not_blended(tmp_path, net):
    torch.manual_seed(1)
    scenes = torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8)
    frames = [scenes[0], scenes[0], scenes[1], scenes[1]]
    for number, frame in enumerate(frames):
        Image.fromarray(frame.permute(1, 2, 0).numpy()).save(tmp_path / f"{number}.png")
    source = open_source([tmp_path])
    output = open_output(tmp_path / "out", Film(source.rate * 4), {})
    with torch.no_grad():
        summary = interpolate(
            source,
            Pace(4),
            maker_of(net, source),
            output,
            detection=Detection(repeats=False),
            tell=False,
        )
    assert (summary.cuts, summary.made) == (1, 6)
    made = sorted((tmp_path / "out").glob("frame-*.png"))[5:8]
    shown = [torch.from_numpy(numpy.array(Image.open(file))).permute(2, 0, 1) for file in made]
    assert [
        torch.equal(image, scenes[scene]) for image, scene in zip(shown, (0, 1, 1), strict=True)
    ] == [True] * 3


class Interrupting:
    """An output that fails after some input frames."""

    def __init__(self, output: Output, after: int) -> None:
        self.output, self.left = output, after

    def has(self, place: Place) -> bool:
        return self.output.has(place)

    def write(self, place: Place, images: list[Tensor]) -> None:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.output.write(place, images)


def test_an_interrupted_folder_goes_on_where_it_stopped(tmp_path, net):
    source = open_source([pictures(tmp_path / "in", 6)])
    target, out = source.rate * 2, tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run_through(source, target, net, Interrupting(open_output(out, Film(target), {"a": 1}), 3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="other settings"):
        open_output(out, Film(target), {"a": 2})
    assert not open_output(tmp_path / "none", Film(target), {}).pause()
    assert not (tmp_path / "none").exists()
    output = open_output(out, Film(target), {"a": 1})
    summary = run_through(source, target, net, output)
    assert (summary.resumed, summary.written) == (6, 6)
    assert levels(out) == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 50]


def test_a_video_keeps_its_sound_and_an_interrupted_one_goes_on(tmp_path, net):
    pytest.importorskip("av")
    from mpt.data.video.video import describe_video, read_frames
    from mpt.data.video.video_writer import VideoWriter

    count = SEGMENT + 4
    with VideoWriter(tmp_path / "in.mp4", 10) as writer:
        for number in range(count):
            writer.write(torch.full((3, 32, 48), 4 * number, dtype=torch.uint8))
    source = open_source([tmp_path / "in.mp4"])
    target, out = source.rate * 2, tmp_path / "out.mp4"
    output = open_output(out, Film(target), {})
    with pytest.raises(KeyboardInterrupt):
        run_through(source, target, net, Interrupting(output, SEGMENT + 2))  # type: ignore[arg-type]
    assert output.pause()
    assert not out.exists()
    output = open_output(out, Film(target), {})
    summary = run_through(source, target, net, output)
    output.finish()
    assert (summary.resumed, summary.written) == (2 * SEGMENT, 8)
    assert describe_video(out).frame_rate == 20
    shown = [float(frame.float().mean()) for frame in read_frames(out)]
    wanted = [min(2.0 * number, 4.0 * (count - 1)) for number in range(2 * count)]
    assert all(abs(one - other) < 3 for one, other in zip(shown, wanted, strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.mp4", "out.mp4"]


@pytest.mark.parametrize("name", ["out.mp4", "out"])
def test_nothing_is_left_where_a_later_frame_is_damaged(tmp_path, net, name):
    pytest.importorskip("av")
    folder = pictures(tmp_path / "in", 5)
    source = open_source([folder])
    (folder / "shot010.png").write_bytes(b"not a picture any more")
    output = open_output(tmp_path / name, Film(source.rate * 2), {})
    with pytest.raises(DataError, match=r"shot010\.png: .* Replace the file$"):
        run_through(source, source.rate * 2, net, output)
    output.discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_bad_input_is_named(tmp_path):
    one = pictures(tmp_path / "one", 1)
    gaps = pictures(tmp_path / "gaps", 5)
    (gaps / "shot009.png").unlink()
    sizes = pictures(tmp_path / "sizes", 3)
    Image.new("RGB", (20, 20)).save(sizes / "shot008.png")
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video" * 50)
    for path, words in (
        (one, r"one picture, shot007\.png; two or more"),
        (one / "shot007.png", "one picture; two or more"),
        (gaps, r"from shot008\.png to shot010\.png: 1 missing"),
        (sizes, r"shot008\.png: 20 x 20 pixels, but shot007\.png has 40 x 24"),
        (empty, "no pictures"),
        (tmp_path / "absent", "there is no such"),
    ):
        with pytest.raises(DataError, match=words):
            open_source([path])
    assert len(open_source([gaps], allow_gaps=True).files) == 4
    pytest.importorskip("av")
    with pytest.raises(DataError, match=r"broken\.mp4: not a video"):
        open_source([broken])


def test_tiles_cover_the_frame_and_blend_to_what_the_whole_gives(net):
    assert [(span.start, span.stop) for span in spans_of(100, 64, 32)] == [
        (0, 64),
        (18, 82),
        (36, 100),
    ]
    torch.manual_seed(2)
    first, last = torch.rand(2, 1, 3, 90, 150)
    grid = grid_of_tiles(90, 150, (80, 80), 64)
    time = torch.full((1, 2), 0.5)
    with torch.no_grad():
        one, other = tiled(net, first, last, time, grid, 64), whole(net, first, last, time)
        assert one.shape == other.shape == (1, 2, 3, 90, 150)
        assert seam_error(net, first, last, grid, 64) < 0.01  # the untrained network moves nothing


def test_neighbouring_tiles_that_differ_are_measured_where_they_overlap(net, monkeypatch):
    levels = iter([0.1, 0.3, 1.6])  # frames are clipped to [0, 1] when they are written
    monkeypatch.setattr(
        tiles, "whole", lambda net, first, *_: torch.full((1, 1, *first.shape[1:]), next(levels))
    )
    first, last = torch.zeros(2, 1, 3, 40, 200)
    seams = TileDifference()
    tiled(
        net, first, last, torch.full((1, 1), 0.5), grid_of_tiles(40, 200, (40, 100), 50), 50, seams
    )
    assert seams.count == 2 * 3 * 40 * 50
    assert seams.grey_levels == pytest.approx(255 * (0.2 + 0.7) / 2, rel=1e-5)
    assert TileDifference().grey_levels == 0


def test_the_device_holds_a_tile_and_no_whole_frame(net, monkeypatch):
    given = []

    def remembering(
        net: FlowWarp, first: torch.Tensor, last: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        given.extend((tensor.device.type, tuple(tensor.shape[-2:])) for tensor in (first, last))
        return torch.ones(1, 1, *first.shape[1:])

    monkeypatch.setattr(tiles, "whole", remembering)
    job = Job(
        Place(0, 0, (Fraction(0),)),
        (Shown(Fraction(1, 2), Fraction(0)),),
        *torch.zeros(2, 3, 90, 150, dtype=torch.uint8),
        blends=True,
    )
    Maker(net, torch.device("meta"), grid_of_tiles(90, 150, (80, 80), 64), 64).make([job])
    assert given == [("meta", (80, 80))] * 2 * 12
    assert int(job.made[Fraction(1, 2)].min()) == 255


def test_the_planner_chooses_fewer_tiles_for_more_memory_and_says_what_is_too_little(net):
    memory = pass_memory(net)
    assert memory.per_pixel > 0
    needed = int(memory.peak_bytes(360, 640))
    assert choose_tiles(net, 360, 640, memory, 2 * needed).count == 1
    few, many = (choose_tiles(net, 360, 640, memory, needed // part) for part in (2, 4))
    assert 1 < few.count < many.count
    assert memory.peak_bytes(*many.size) < needed / 4
    # float32 frames
    assert pass_memory(net, times=7).peak_bytes(360, 640) >= needed + 6 * 12 * 360 * 640
    with pytest.raises(MemoryBudgetError, match="--vram: a tile of"):
        choose_tiles(net, 360, 640, memory, needed // 1000)


def test_a_budget_on_a_gpu_is_what_its_context_leaves(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 3060")
    context = load_calibration("rtx3060").context_bytes
    assert room_of(2**30, torch.device("cpu"), 10) == 2**30
    assert room_of(2**30, torch.device("cuda"), 10) == 2**30 - context - 480
    with pytest.raises(MemoryBudgetError, match=r"--vram: .* is less than the CUDA context takes"):
        room_of(context, torch.device("cuda"), 10)
