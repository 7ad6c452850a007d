"""What pyproject.toml cannot say: `configs/` is installed inside the package, as `mpt/configs`, and the command's first
lines also outside of it, as `mpt_trainer`."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[
        *find_namespace_packages(include=["mpt", "mpt.*"]),
        "mpt.configs",
        "mpt.configs.presets",
        "mpt_trainer",
    ],
    package_dir={"mpt.configs": "configs", "mpt_trainer": "mpt/entry_point"},
    package_data={
        "mpt": [
            "py.typed",
            "**/*.npz",
            "**/*.json",
            "**/*.html",
            "**/*.j2",
            "**/*.md",
            "**/*.txt",
            "**/*.yaml",
        ],
        "mpt.configs": ["*.yaml"],
        "mpt.configs.presets": ["*.yaml"],
    },
)
