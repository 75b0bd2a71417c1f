"""Work for the processes of a pool; a module of its own, so that they import nothing heavy."""

import os
import signal
import time

from separator import jobs
from separator.errors import SeparatorError
from separator.inputs import Input
from separator.jobs import Outcome, Task


def pretend_to_work(item: Input, task: Task) -> Outcome:
    """Do what the name of the file says."""
    name = item.path.name
    if name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "has no model":
        raise SeparatorError("no model 'x'")
    if name == "dies next to another" and not item.path.exists():
        item.path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "runs until stopped":
        item.path.touch()
        while not jobs._stop.is_set():
            time.sleep(0.01)
        item.path.unlink()
        raise KeyboardInterrupt
    if name.startswith("slow"):
        time.sleep(0.5)
    return Outcome(item, warnings=(str(os.getpid()), os.readlink("/proc/self/fd/0")))
