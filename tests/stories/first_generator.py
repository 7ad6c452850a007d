"""A stranger's own pictures become a DCGAN; samples in a grid, one by one, by seed, and between seeds."""

from pathlib import Path

from telling import mpt, pictures, refused, size_of, write

pictures("flowers", {"poppy": (200, 40, 40), "gentian": (40, 40, 200)}, count=30)
write(
    "mine.yaml",
    """
    model: {name: dcgan, image_size: 16, features: 8, latent_size: 16}
    dataset: {name: image_folder, root: flowers}
    task: {metric_samples: 200}
    train: {steps: 20, batch_size: 16, sample_every: 10}
    name: my flowers
    """,
)
mpt("validate mine.yaml", "mine.yaml")
said = mpt(
    "train mine.yaml",
    "53 training and 7 test samples",
    "step 20/20",
    "report",
    "rests on 7 test images",
)
assert said.count("warning:") == 1, said
run = Path("runs/my flowers")
assert {path.name for path in (run / "samples").iterdir()} >= {
    "step-00000000.png",
    "step-00000020.png",
}
assert (run / "report.html").stat().st_size > 10_000

mpt("infer", "64 pictures", "per second")  # the newest finished run
assert (run / "inference" / "samples.png").is_file()
mpt("infer --count 5 --single -o five", "wrote 5 files")
assert len(list(Path("five").glob("sample-000*.png"))) == 5
assert size_of("five/sample-0000.png") == (16, 16)
mpt("infer --count 9 --seed 4 -o nine.png", "wrote 9 pictures to nine.png")
refused("infer --count 9 --seed 4 -o nine.png", "nine.png is there already", "--overwrite", code=2)
mpt("infer --count 9 --seed 4 -o again.png")
mpt("infer --count 9 --seed 5 -o other.png")
assert (
    Path("nine.png").read_bytes()
    == Path("again.png").read_bytes()
    != Path("other.png").read_bytes()
)
mpt("infer --walk 3:17:5 --frames 4 -o walk", "walk.gif (7 frames)")
assert Path("walk/walk.gif").read_bytes().startswith(b"GIF8")
