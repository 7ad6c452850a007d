"""Is half precision worse here? fp32 against amp with the same seeds, a verdict, a page, and a gate for scripts."""

import json
from pathlib import Path

from telling import mpt, refused, write

write(
    "digits.yaml",
    """
    model: {name: small_cnn, image_size: 16, features: 8}
    dataset: {name: digits}
    optimizer: {name: adam, lr: 3e-3}
    train: {steps: 80, batch_size: 32}
    """,
)
said = mpt("compare fp32 amp --config digits.yaml --seeds 3 --margin 5%", "6 runs", "wrote")
assert "amp against fp32, accuracy, 3 paired seeds: within the margin" in said, said
folder = Path("runs/compare-small_cnn-fp32-amp")
assert folder.as_posix() + "/comparison.html" in said, said
told = json.loads((folder / "comparison.json").read_text("utf-8"))
assert [mode["mode"] for mode in told["modes"]] == ["fp32", "amp"]
assert told["passes"], told
page = (folder / "comparison.html").read_text("utf-8")
assert "within the margin" in page
assert "://" not in page.replace("http://www.w3.org/", ""), "the page must not need a network"

runs = " ".join(
    str(folder / f"{mode}-seed-{seed}") for mode in ("fp32", "amp") for seed in range(3)
)
# finished runs, and a gate for scripts
mpt(f"compare {runs} --margin 5% --gate -o again", "within the margin")
refused(f"compare {runs} train.steps=9", "changes nothing about finished runs", code=2)
refused(f"compare {runs} --margin 0.0001% --gate -o strict", "amp against fp32", code=8)
