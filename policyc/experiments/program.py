"""A user's program: a script, a module or a piece of code, started the way `python` starts it.

Also callbacks on its imports, and tracebacks without policyc's frames.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import runpy
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import BuiltinImporter, ModuleSpec, SourceFileLoader
from itertools import pairwise
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Literal

from policyc.language.bundled import data_folder


class BadProgram(Exception):
    """The program cannot be started. The message says why."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program and its arguments. `name` is the path of a script, the name of a module, or the code itself."""

    name: str
    args: tuple[str, ...] = ()
    kind: Literal["script", "module", "code", "stdin"] = "script"

    @classmethod
    def from_words(cls, words: Sequence[str]) -> Program:
        """Reads a command line: `train.py --lr 1`, `-m pkg.train --lr 1`, `-c CODE` or `- --lr 1`."""
        if not words:
            raise BadProgram(
                "name a script to run, or -m and a module, or -c and code, or - for standard input"
            )
        if words[0] in ("-m", "-c"):
            if len(words) < 2:
                raise BadProgram("-m needs the name of a module" if words[0] == "-m" else "-c needs code")
            return cls(words[1], tuple(words[2:]), "module" if words[0] == "-m" else "code")
        if words[0] == "-":
            try:
                return cls(sys.stdin.read() if sys.stdin is not None else "", tuple(words[1:]), "stdin")
            except UnicodeDecodeError as error:
                raise BadProgram(f"standard input: byte {error.start} is not {error.encoding}") from None
        return cls(words[0], tuple(words[1:]))

    @property
    def help_word(self) -> str:
        """The argument that by convention asks for help or the version; empty if there is none.

        `-h` or `--version` with a value, as in `-h 8` or `--version 2`, is some other option.
        """
        for word, next_word in pairwise((*self.args, "")):
            has_value = next_word != "" and not next_word.startswith("-")
            if word == "--help" or (word in ("-h", "--version") and not has_value):
                return word
        return ""

    def check(self) -> None:
        """Raises BadProgram if there is nothing to run.

        Only the top-level package of a module is looked up: finding a submodule would import its parents.
        """
        if self.kind == "script" and not os.path.exists(self.name):
            raise BadProgram(f"no such script: '{self.name}'")
        if self.kind != "module":
            return
        package = self.name.partition(".")[0]
        sys.path.insert(0, os.getcwd())
        try:
            spec = importlib.util.find_spec(package) if package else None
        except ValueError:  # imported already, without a spec: `__main__`, or a module created at run time
            return
        finally:
            sys.path.pop(0)
        if spec is None:
            raise BadProgram(f"no module named '{self.name}'")

    def run(self) -> None:
        """Runs the program as `__main__`. Leaves a script or code in `sys.modules`, as Python does."""
        sys.argv = [self.name, *self.args]
        if self.kind == "module":
            _prepend_to_path(os.getcwd())
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        elif self.kind == "code":
            sys.argv[0] = "-c"
            _prepend_to_path("")
            _run_as_main(self.name, "<string>", __loader__=BuiltinImporter)
        elif self.kind == "stdin":
            sys.argv[0] = "-"
            _prepend_to_path("")
            names = {"__file__": "<stdin>", "__cached__": None, "__loader__": BuiltinImporter}
            _run_as_main(self.name, "<stdin>", **names)
        else:
            self._run_script()

    def _run_script(self) -> None:
        path = Path(self.name)
        if path.is_dir() or path.suffix == ".pyc" or (path.is_file() and zipfile.is_zipfile(path)):
            if path.suffix == ".pyc":
                _prepend_to_path(str(path.resolve().parent))
            runpy.run_path(self.name, run_name="__main__")
            return
        _prepend_to_path(str(path.resolve().parent))
        file = os.path.abspath(self.name)
        with io.open_code(file) as stream:
            source = stream.read()
        _run_as_main(
            source, file, __file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file)
        )


def _prepend_to_path(folder: str) -> None:
    """Puts the program's folder first in `sys.path`, as Python does, unless PYTHONSAFEPATH is set.

    The flag `-P` does not count: sweeps set it for policyc's own imports.
    """
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, folder)


def _run_as_main(source: str | bytes, file: str, **attributes: Any) -> None:
    """Runs code in a new module `__main__` with these attributes."""
    main = ModuleType("__main__")
    vars(main).update(__annotations__={}, __builtins__=sys.modules["builtins"], **attributes)
    sys.modules["__main__"] = main
    exec(compile(source, file, "exec", dont_inherit=True), vars(main))


# ---- its imports


@contextlib.contextmanager
def on_import(name: str, callback: Callable[[], None]) -> Iterator[None]:
    """Calls a function once: right after the first import of a module, or now if it is imported already."""
    if name in sys.modules:
        callback()
        yield
        return
    finder = _Finder(name, callback)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.remove()


class _Finder(MetaPathFinder):
    """Delegates to the other finders, and makes the loader of one module call a function after executing it."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name, self._callback = name, callback
        self._is_searching = False

    def remove(self) -> None:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != self._name or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader  # its `exec_module` is replaced until it has run once
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = run
            run(module)
            self.remove()
            self._callback()

        loader.exec_module = exec_module
        return spec


# ---- its tracebacks


_HIDDEN_FILES = (
    f"{Path(__file__).parent.parent}{os.sep}",
    "<frozen runpy>",
    "<frozen importlib",
    runpy.__file__,
    contextlib.__file__,
)
"""Tracebacks leave out frames of files whose names start with one of these."""


def print_traceback(error: BaseException) -> None:
    """Prints a traceback as Python does, without the frames of policyc."""
    sys.stdout.flush()
    trace = skip_hidden_frames(error.__traceback__)
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, trace)
        return
    report = traceback.TracebackException(type(error), error, trace)
    link: traceback.TracebackException | None = report
    while link is not None:
        link.stack = traceback.StackSummary.from_list(
            [frame for frame in link.stack if not is_hidden(frame.filename)]
        )
        link = link.__cause__ or link.__context__
    sys.stderr.write("".join(report.format()))


def skip_hidden_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from its first frame in the program. None if it has none."""
    while trace is not None and is_hidden(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def is_hidden(file: str) -> bool:
    """Whether tracebacks leave out this file. The bundled models are programs, so they are shown."""
    return file.startswith(_HIDDEN_FILES) and not file.startswith(f"{data_folder('models')}{os.sep}")
