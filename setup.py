"""Builds map the top-level folders into the package `tandem`: the links in tandem/ get lost in zip downloads."""

from setuptools import find_packages, setup

TOPS = ("cluster", "configs", "offload", "parallel", "workers")

setup(
    packages=["tandem", *(f"tandem.{found}" for found in find_packages(include=[f"{top}*" for top in TOPS]))],
    package_dir={f"tandem.{top}": top for top in TOPS},
)
