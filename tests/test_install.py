"""What a new user's pip has to do: resolve the pinned versions, install the built wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
MACOS = {"MACOSX_DEPLOYMENT_TARGET": "14.0"}  # the oldest that torch has wheels for


def uv(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    found = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip("uv is not installed: pip install 'heedful[dev]'")
    environ = {**os.environ, **environment, "UV_PYTHON_DOWNLOADS": "never"}
    return subprocess.run([found, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True)


def others() -> list[str]:
    """Other supported Pythons of this machine, on the PATH or kept by pyenv; one for each version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = []
    for version in PYTHONS:
        if version == f"{sys.version_info.major}.{sys.version_info.minor}":
            continue
        places = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python{version}")))]
        works = (x for x in places if x and subprocess.run([x, "-c", ""], capture_output=True).returncode == 0)
        found += list(works)[:1]
    return found


@pytest.mark.parametrize("platform", ["linux", "macos"])
@pytest.mark.parametrize("python", PYTHONS)
def test_the_constraints_can_be_met(python, platform):
    asked = "--python-version", python, "--python-platform", platform
    found = uv("pip", "compile", *asked, "-c", "constraints.txt", "--all-extras", "pyproject.toml", **MACOS)
    if found.returncode and ("error sending request" in found.stderr or "dns error" in found.stderr):
        pytest.skip("the package registry can't be reached")
    assert found.returncode == 0, found.stderr
    assert "torch==" in found.stdout


def test_constraints_leave_triton_to_torch():
    names = [line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    assert "torch" in names and "triton" not in names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    made = uv("build", "--wheel", "--out-dir", str(folder), "--python", sys.executable)
    assert made.returncode == 0, made.stderr
    [found] = folder.glob("*.whl")
    return found


@pytest.mark.parametrize("python", others() or [None])
def test_another_python_takes_the_wheel(wheel, python, tmp_path):
    """Every file compiles, and the library is imported where that Python has torch, which is too large to install."""
    if python is None:
        pytest.skip("this machine has one supported Python")
    place = tmp_path / "site"
    installed = uv("pip", "install", "--no-deps", "--target", str(place), "--python", python, str(wheel))
    assert installed.returncode == 0, installed.stderr
    compiled = subprocess.run([python, "-m", "compileall", "-q", str(place)], capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stdout
    environment = {**os.environ, "PYTHONPATH": str(place)}
    if subprocess.run([python, "-c", "import torch, jaxtyping"], env=environment, capture_output=True).returncode == 0:
        said = subprocess.run([python, "-c", "import heedful"], env=environment, capture_output=True, text=True)
        assert said.returncode == 0, said.stderr
