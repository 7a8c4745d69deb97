"""What a Ctrl-C may not cut in two."""

import os
import signal
import threading

import pytest

from carryover.serving.cluster import interrupts_held


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_comes_after_the_block():
    reached = False
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        interrupt()
        reached = True
    assert reached
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_an_error_in_the_block_is_not_hidden_and_the_next_interrupt_works():
    with pytest.raises(ValueError), interrupts_held():
        raise ValueError
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_other_threads_leave_signals_alone():
    reached = []

    def block():
        with interrupts_held():
            reached.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert reached == [signal.getsignal(signal.SIGINT)]
