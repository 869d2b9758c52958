"""The wheel ships what the tree holds, and nobody imports a folder by its bare name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import handrail

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))
TOOL = PROJECT["tool"]["setuptools"]
FOLDERS: dict[str, str] = TOOL["package-dir"]
NOT_SHIPPED = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "*.egg-info"
)

BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""

IMPORT_EVERYTHING = """
import importlib, pkgutil, django, handrail
from django.conf import settings
ours = ["handrail.integrations.django", "django.contrib.admin", "django.contrib.auth"]
settings.configure(INSTALLED_APPS=[*ours, "django.contrib.contenttypes"])
django.setup()  # its modules are imported within a project alone
for module in pkgutil.walk_packages(handrail.__path__, "handrail."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(handrail.__file__)
"""


def test_every_package_in_the_tree_is_listed() -> None:
    found = {
        ".".join([name, *init.parent.relative_to(ROOT / folder).parts])
        for name, folder in FOLDERS.items()
        for init in (ROOT / folder).rglob("__init__.py")  # does not follow links
    }

    assert set(TOOL["packages"]) == found


def test_each_folder_has_its_link_for_the_type_checkers() -> None:
    for name, folder in FOLDERS.items():
        assert (ROOT / name.replace(".", "/")).resolve() == ROOT / folder


def test_importing_the_core_imports_neither_the_queue_nor_the_database() -> None:
    """`import handrail.agent` runs handrail/__init__.py first; it must stay light."""
    heavy = {"alembic", "celery", "kombu", "redis", "sqlalchemy", "sqlmodel", "typer"}
    code = (
        "import sys, importlib, pkgutil, handrail.agent as core\n"
        "for module in pkgutil.walk_packages(core.__path__, 'handrail.agent.'):\n"
        "    importlib.import_module(module.name)\n"
        f"print(*sorted({heavy} & set(sys.modules)))"
    )

    assert _python(code) == ""


def test_every_public_name_can_be_imported() -> None:
    for name in handrail.__all__:
        assert getattr(handrail, name) is not None


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Fleeet'"):
        _ = handrail.Fleeet


def test_the_version_is_that_of_the_project() -> None:
    assert handrail.__version__ == PROJECT["project"]["version"]


def test_no_folder_was_imported_by_its_bare_name() -> None:
    bare = set(FOLDERS.values()) - {"handrail"}

    assert not bare & {module.partition(".")[0] for module in sys.modules}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, built from a copy, so that the tree stays as it is."""
    place = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, place / "tree", symlinks=True, ignore=NOT_SHIPPED)
    return _build("sdist", place / "tree", place)


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """The wheel, built from the source distribution alone."""
    place = sdist.parent
    shutil.unpack_archive(sdist, place)
    return _build("wheel", place / sdist.name.removesuffix(".tar.gz"), place)


def test_the_wheel_holds_every_file_of_the_parts_and_nothing_else(wheel: Path) -> None:
    """A module or data file that `packages` and `package-data` forget would be silently absent."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert packed == {
        f"{name.replace('.', '/')}/{file.relative_to(ROOT / folder).as_posix()}"
        for name, folder in FOLDERS.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_the_source_distribution_holds_the_folders_themselves(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    top = {parts[1] for member in members if len(parts := Path(member.name).parts) > 1}

    assert set(FOLDERS.values()) | {"LICENSE", "README.md", "pyproject.toml"} <= top
    assert not [member.name for member in members if member.issym()]


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_is_installed_and_runs_elsewhere(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Every module imports, and the command starts, where there is no checkout."""
    distribution: Path = request.getfixturevalue(kind)
    environment = _environment_with_our_dependencies(tmp_path / "venv")
    python, command = environment / "bin" / "python", environment / "bin" / "handrail"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    _run([*pip, "--no-index", "--no-deps", "--no-build-isolation", distribution], tmp_path)

    home = _run([python, "-c", IMPORT_EVERYTHING], tmp_path)
    assert environment in Path(home).parents
    assert "handrail" in _run([command, "--help"], tmp_path)
    assert "handrail" in _run([python, "-m", "handrail", "--help"], tmp_path)


def _environment_with_our_dependencies(place: Path) -> Path:
    """Return a virtual environment that sees what this one has installed, but not Handrail.

    Path files inside a directory that a path file names are not read: our editable install, which
    is one, stays behind.
    """
    _run([sys.executable, "-m", "venv", "--without-pip", place], ROOT)
    [packages] = place.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "ours.pth").write_text("\n".join(ours))
    return place


def _build(kind: str, tree: Path, place: Path) -> Path:
    name = _run([sys.executable, "-c", BUILD, kind, place], tree).splitlines()[-1]
    return place / name


def _python(code: str) -> str:
    return _run([sys.executable, "-c", code], ROOT / "tests")


def _run(command: Sequence[str | Path], directory: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()
