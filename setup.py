"""What pyproject.toml cannot say: `configs/` is installed inside the package, as `mpt/configs`."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["mpt", "mpt.*"]), "mpt.configs"],
    package_dir={"mpt.configs": "configs"},
    package_data={
        "mpt": ["py.typed", "**/*.npz", "**/*.json", "**/*.html", "**/*.j2", "**/*.md", "**/*.txt"],
        "mpt.configs": ["*.yaml", "presets/*.yaml"],
    },
)
