"""The processes of one launch: they join, they stop together, and they notice when one of them is lost.

Each of them may be the first to know that something is wrong; here one speaks, whichever it is. A process
that is lost shows in the others as an error of a collective or, where torchrun is quicker or NCCL never
returns, as the SIGTERM by which torchrun ends them.

Left out on purpose: starting processes again, which is torchrun's (``--max-restarts``).
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from transformers import TrainingArguments

from streamattn import doctor
from streamattn.job import Job, one_line

SECONDS_TO_SPEAK = 15.0  # and to exit: some seconds where processes share few cores

_speaking = threading.Lock()  # never released: who has it ends the process


class RefusedElsewhere(Exception):
    """Another process of the launch says why."""


def join(job: Job) -> None:
    """Look at this machine and at torchrun's variables, and wait for the other processes, if there are any.

    TrainingArguments would wait without its ``ddp_timeout`` on the CPU.

    Args:
        job: the job.

    Raises:
        ValueError: something is wrong with the machine or the launch, in one line.
        ConnectionError: the other processes don't come.
    """
    values = job.training
    seconds = values.get("ddp_timeout", TrainingArguments.ddp_timeout)
    findings = doctor.examine(
        os.environ,
        doctor.look(gpus=not values.get("use_cpu")),
        config=str(job.config),
        use_cpu=bool(values.get("use_cpu")),
        backend=values.get("ddp_backend"),
        timeout=seconds,
    )
    for finding in doctor.check(findings):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"warning: {finding}")
    if not doctor.is_launched(os.environ):
        return
    backend = values.get("ddp_backend") or ("gloo" if uses_cpu(job) else "nccl")
    timeout = timedelta(seconds=seconds)
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore
        # torchrun's store outlives a restart, and with it the addresses of the processes before that.
        store = dist.PrefixStore(f"attempt {_attempt(os.environ)}", store)  # type: ignore
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (RuntimeError, ValueError) as error:  # torch.distributed.DistError is a RuntimeError
        raise ConnectionError(f"can't join the process group: {one_line(error)}") from None


def uses_cpu(job: Job) -> bool:
    """``use_cpu``, by default where there is no GPU.

    Without it accelerate makes each process of a launch on the CPU train a model of its own.
    """
    return bool(job.training.get("use_cpu", not torch.cuda.is_available()))


def leave() -> None:
    """End the process group, if there is one."""
    if joined():
        dist.destroy_process_group()


def raise_in_one_process(mistake: Exception | None) -> None:
    """Raise the mistake of the first process that has one; all processes call this, for all have to stop."""
    found = [mistake is not None]
    if joined():
        found *= dist.get_world_size()
        dist.all_gather_object(found, mistake is not None)
    if any(found):
        speaks = found.index(True) == (dist.get_rank() if len(found) > 1 else 0)
        raise mistake if speaks and mistake is not None else RefusedElsewhere


def let_the_first_speak(everywhere: bool = False) -> None:
    """Wait: if the first process of this host refuses the job too, torchrun ends this one meanwhile.

    With ``everywhere`` the first one waits too, for a process that has more to say.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and (everywhere or os.environ.get("LOCAL_RANK", "0") != "0"):
        with suppress(KeyboardInterrupt):
            time.sleep(SECONDS_TO_SPEAK)


def loss(error: BaseException) -> str | None:
    """What to say of an error by which another process is gone or doesn't answer; None for other errors."""
    if not joined() or dist.get_world_size() == 1 or not isinstance(error, RuntimeError):
        return None
    # Gloo's begins with the place in its source, and ends with advice.
    from_gloo = re.match(r"\[\S*gloo/\S+\] (.*?)(\. This is typically|$)", one_line(error))
    if from_gloo is None and not isinstance(error, dist.DistError):
        return None
    reason = one_line(error) if from_gloo is None else from_gloo[1]
    return f"another process of this launch was lost ({reason})"


def end(status: int, line: Callable[[], str]) -> None:
    """End this process at once, with a line on stderr if no other process of the launch has said one.

    At once, for a process group that lost a member can keep its destructor waiting. Until then SIGTERM is
    ignored: torchrun, which noticed too, sends it while this process asks whether it is the first to speak.

    Args:
        status: the exit status.
        line: what to say; called only in the process that says it.
    """
    if threading.current_thread() is threading.main_thread():  # which alone may set handlers
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _speaking.acquire()
    try:
        if _is_first_to_speak(os.environ):
            print(line(), file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@contextmanager
def ending_on_sigterm(line: Callable[[], str]) -> Iterator[None]:
    """While inside, SIGTERM says a line and ends the process, also where the main thread waits inside C++.

    Python runs a signal's handler only when C++ returns, which a collective without its peer never does; what
    the interpreter does at once is to write the signal's number to a pipe.

    Args:
        line: what to say; see `end`.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    no_signal = 0  # ends the thread: of a pipe that processes forked meanwhile hold, too, no end would come

    def wait() -> None:
        while (number := os.read(reader, 1)[0]) != no_signal:
            if number == signal.SIGTERM:
                end(128 + signal.SIGTERM, line)

    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    pipe = signal.set_wakeup_fd(writer)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(pipe)
        signal.signal(signal.SIGTERM, handler)
        os.set_blocking(writer, True)
        os.write(writer, bytes([no_signal]))
        thread.join()
        os.close(writer)
        os.close(reader)


def _attempt(environment: Mapping[str, str]) -> str:
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0")


def joined() -> bool:
    """Whether this process is in a process group, of itself alone perhaps."""
    return dist.is_available() and dist.is_initialized()


def _is_first_to_speak(environment: Mapping[str, str]) -> bool:
    """Ask the store of the launch, which torchrun keeps alive; where it is gone too, everybody speaks."""
    if int(environment.get("WORLD_SIZE", "1")) == 1:
        return True
    try:
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=2))  # type: ignore
        return store.add(f"streamattn: lost in attempt {_attempt(environment)}", 1) == 1
    except (RuntimeError, ValueError, KeyError):
        return True
