"""Processes that compile in advance: an interrupt ends them, and reaches only the process that started them."""

from __future__ import annotations

import multiprocessing
import signal
import time
from concurrent.futures.process import BrokenProcessPool

import pytest

from gpu_ops.cli.warmup import in_processes


def test_an_interrupt_ends_them_at_once():
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt), in_processes(1, time.sleep, [(30,)] * 3) as futures:
        raise KeyboardInterrupt
    assert all(future.cancelled() or isinstance(future.exception(), BrokenProcessPool) for future in futures)
    assert set(multiprocessing.active_children()) <= before


def test_they_leave_interrupts_to_the_process_that_started_them():
    ours = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with in_processes(1, signal.pthread_sigmask, [(signal.SIG_BLOCK, ())]) as (future,):
        assert signal.SIGINT in future.result()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == ours
