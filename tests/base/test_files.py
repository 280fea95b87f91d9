"""Output files: regular files are replaced atomically; links, devices, FIFOs and descriptors are written through."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from policyc.base import files
from policyc.base.files import atomic_write, open_output
from tests.support.command import ROOT

pytestmark = [pytest.mark.any_jax, pytest.mark.ordinary_user]


def write(path: Path, text: bytes = b"new") -> None:
    with atomic_write(path) as stream:
        stream.write(text)


@pytest.fixture
def umask():
    """Sets the umask, and restores the old one."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path, umask, mask, mode):
    umask(mask)
    write(tmp_path / "new")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == mode


def test_a_replaced_file_keeps_its_mode(tmp_path):
    path = tmp_path / "old"
    path.write_text("old")
    path.chmod(0o640)
    write(path)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o640)


def test_a_symbolic_link_is_followed_and_stays(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    link.symlink_to(target)
    for text in (b"first", b"second"):  # the first write creates the target
        write(link, text)
        assert link.is_symlink()
        assert target.read_bytes() == text
    assert [p.name for p in target.parent.iterdir()] == ["target"]


def test_a_cycle_of_links_is_an_error_and_stays(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="links"):
        write(tmp_path / "a")
    assert (tmp_path / "a").is_symlink()


def test_a_fifo_is_written_to_and_stays(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(path.read_bytes()))
    reader.start()
    write(path)
    reader.join(120)
    assert received == [b"new"]
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_device_is_written_to_and_stays(tmp_path):
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    for path in (Path("/dev/null"), link):
        write(path)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert link.is_symlink()


def test_a_folder_is_an_error(tmp_path):
    with pytest.raises(IsADirectoryError):
        write(tmp_path)


def test_a_name_of_the_longest_length_can_be_written(tmp_path):
    write(tmp_path / ("x" * 255))
    assert (tmp_path / ("x" * 255)).read_bytes() == b"new"


def test_if_the_block_raises_the_old_file_stays_and_nothing_else(tmp_path):
    path = tmp_path / "old"
    path.write_text("old")

    def fail() -> None:
        with atomic_write(path) as stream:
            stream.write(b"part")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("name", ["/dev/stdout", "-", "/dev/fd/1", "/proc/self/fd/1", "link"])
@pytest.mark.parametrize("mode", ["w", "a"])
def test_standard_output_is_written_in_order_wherever_it_goes(tmp_path, name, mode):
    """Also if it is a regular file that the shell opened, which must be neither replaced nor truncated."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    path = tmp_path / "out"
    path.write_text("before\n")
    program = (
        "from policyc.base.files import open_output\n"
        "print('first')\n"
        f"with open_output({name!r}) as stream: stream.write(b'second\\n')\n"
        "print('third')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with path.open(mode) as output:
        subprocess.run(
            [sys.executable, "-c", program], stdout=output, cwd=tmp_path, env=environment, check=True
        )
    assert path.read_text() == ("before\n" if mode == "a" else "") + "first\nsecond\nthird\n"


def test_a_dash_is_standard_output(capsysbinary):
    with open_output("-") as stream:
        stream.write(b"text")
    assert capsysbinary.readouterr().out == b"text"


def test_a_user_without_a_home_folder_has_no_cache(tmp_path, monkeypatch):
    """No folder named `~` is made. A relative XDG_CACHE_HOME is ignored, as its specification says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(FileNotFoundError, match="no home folder"):
        files.cache_folder()
    assert not list(tmp_path.iterdir())
