"""Workers that die; nothing heavy is imported, since each process of a cluster does it again."""

from __future__ import annotations

import os
import signal
import time


def dies_once(marks):
    def work(item: int) -> int:
        mark = os.path.join(marks, str(item))
        if item == 2 and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if item == 9:
            raise ValueError("nine will not do")
        return item * item

    return work


def dies():
    def work(item: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return item

    return work


class Odd(Exception):
    """An exception that pickle can't make again."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def does_anything():
    def work(item: str):
        if item == "hang":
            time.sleep(60)
        elif item == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif item == "raise":
            raise ValueError("this one raises")
        elif item == "odd error":
            raise Odd("a", "b")
        elif item == "unsendable":
            return lambda: None
        elif item == "print":
            print("said on the way")
        import torch

        return item, torch.get_num_threads()

    return work


def sleeps():
    def work(seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    return work


def tells_its_process():
    return lambda item: os.getpid()
