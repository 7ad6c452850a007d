"""Write `mpt/data/digits.npz` from the digits file of scikit-learn (or UCI's `optdigits.tes`, the same samples).

Usage: python scripts/documents/make_digits.py digits.csv.gz
In a scikit-learn wheel the file is `sklearn/datasets/data/digits.csv.gz`. The split is drawn here once and stored, so
that no library's random stream can ever move it: 36 test samples of each class, 360 in total.
"""

import gzip
import sys
from pathlib import Path

import numpy

TEST_PER_CLASS = 36


def main(source: Path) -> None:
    text = gzip.decompress(source.read_bytes()) if source.suffix == ".gz" else source.read_bytes()
    table = numpy.loadtxt(text.decode().splitlines(), delimiter=",").astype(numpy.uint8)
    images, labels = table[:, :64].reshape(-1, 8, 8), table[:, 64]
    generator = numpy.random.Generator(numpy.random.PCG64(1797))
    test = [
        generator.permutation(numpy.flatnonzero(labels == digit))[:TEST_PER_CLASS]
        for digit in range(10)
    ]
    target = Path(__file__).resolve().parents[2] / "mpt" / "data" / "digits.npz"
    numpy.savez_compressed(
        target,
        images=images,
        labels=labels,
        test_indices=numpy.sort(numpy.concatenate(test)).astype(numpy.int16),
    )
    print(f"{target}: {len(images)} images, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
