"""One of several processes speaks; a lost one is known by its error, a stopped one has a last word."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from streamattn import doctor, processes
from tests.test_doctor import TWO, free_port
from tests.test_run_folder import folder_of

GLOO = (
    "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection "
    "reset by peer. This is typically caused by a remote worker hanging"
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(GLOO), "Read error [127.0.0.1]:1: Connection reset by peer"),
        (RuntimeError("[x/gloo/y.cc:1] Timed out waiting 3000ms"), "Timed out waiting 3000ms"),
        (dist.DistNetworkError("no answer"), "no answer"),
        (dist.DistBackendError("NCCL error"), "NCCL error"),
        (RuntimeError("size mismatch"), None),
        (RuntimeError("CUDA out of memory"), None),
        (OSError("[x/gloo/y.cc:1] a file"), None),
    ],
)
def test_errors_by_which_another_process_is_lost(
    error: Exception, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert processes.loss(error) is None, "there is no other"
    monkeypatch.setattr(processes, "joined", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    said = processes.loss(error)
    assert said == (expected and f"another process of this launch was lost ({expected})")
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    assert processes.loss(error) is None


def test_the_first_to_notice_speaks() -> None:
    """In each attempt; and everybody where the store is gone with its process."""
    store = dist.TCPStore(  # type: ignore[reportPrivateImportUsage]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
    launched = TWO | {"MASTER_PORT": str(store.port)}
    again = launched | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert [processes._is_first_to_speak(one) for one in (launched, launched, again, again)] == [
        True,
        False,
        True,
        False,
    ]
    assert processes._is_first_to_speak(TWO | {"MASTER_PORT": free_port()})
    assert processes._is_first_to_speak({})


def test_sigterm_has_a_last_word_also_where_python_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, word = threading.Event(), []

    def end(status: int, line: object) -> None:
        word.extend([status, line])
        ended.set()

    monkeypatch.setattr(processes, "end", end)
    before = signal.getsignal(signal.SIGTERM)

    def last_word() -> str:
        return "stopped"

    with processes.ending_on_sigterm(last_word):
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(20)
    assert word == [143, last_word]
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_sigterm_does_not_cut_off_a_last_word(capfd: pytest.CaptureFixture[str]) -> None:
    """As torchrun's would while the store is asked who speaks."""

    def last_word() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "lost"

    speaker = os.fork()
    if speaker == 0:
        processes.end(1, last_word)
    assert os.waitstatus_to_exitcode(os.waitpid(speaker, 0)[1]) == 1
    assert capfd.readouterr().err == "lost\n"


def test_processes_that_were_forked_meanwhile_keep_nobody_waiting() -> None:
    """As DataLoader's workers do, which live as long as their iterator."""
    with processes.ending_on_sigterm(lambda: "stopped"):
        forked = os.fork()
        if forked == 0:
            time.sleep(30)
            os._exit(0)
        began = time.monotonic()
    assert time.monotonic() - began < 20
    os.kill(forked, signal.SIGKILL)
    os.waitpid(forked, 0)


def test_what_is_wrong_stops_a_job_and_what_could_be_better_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = folder_of(tmp_path / "out").job
    for name in TWO:
        monkeypatch.delenv(name, raising=False)
    old = doctor.Machine(gpus=((7, 5),), nccl="2.27.5")
    monkeypatch.setattr(doctor, "look", lambda gpus: old if gpus else doctor.Machine())
    processes.join(job)
    assert capsys.readouterr().out.startswith("warning: cuda:0: expected compute capability 8.0 or newer")
    job.training["use_cpu"] = True
    processes.join(job)
    assert capsys.readouterr().out == ""
    driver = doctor.Machine(torch_cuda="13.0", driver_cuda=(12, 4))
    monkeypatch.setattr(doctor, "look", lambda gpus: driver)
    processes.join(job)
    del job.training["use_cpu"]
    with pytest.raises(ValueError, match=r"driver: it serves CUDA 12\.4"):
        processes.join(job)
