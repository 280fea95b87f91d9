"""Waits for the threads and children of a program, as Python does before a process ends."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from typing import Any

_EXECUTORS = {
    "concurrent.futures.process": ("_threads_wakeups", "_global_shutdown"),
    "concurrent.futures.thread": ("_threads_queues", "_shutdown"),
}
"""The modules of executors: where each has its threads, and its flag that the process ends."""


class StartedWork:
    """The threads, and the children of `multiprocessing`, that are started after this object is made."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._earlier_threads = {*threading.enumerate()}
        self._earlier_children = {*multiprocessing.active_children()}

    def join(self) -> None:
        """Waits for them, so that the policy holds in them to their end, and their refusals count.

        Python ends daemons itself.
        """
        self._end_executors()
        for thread in threading.enumerate():
            is_other = thread not in self._earlier_threads and thread is not threading.current_thread()
            if is_other and not thread.daemon:
                thread.join()
        if os.getpid() != self._process:
            return  # a fork of the program, which has the children of its parent
        for child in multiprocessing.active_children():
            if child not in self._earlier_children and not child.daemon:
                child.join()

    def _end_executors(self) -> None:
        """Tells the threads of executors that no more work comes. Python does so at the end of a process."""
        for name, (threads, is_ending) in _EXECUTORS.items():
            executors: Any = sys.modules.get(name)
            if executors is not None and any(
                thread not in self._earlier_threads for thread in getattr(executors, threads)
            ):
                executors._python_exit()
                setattr(executors, is_ending, False)
