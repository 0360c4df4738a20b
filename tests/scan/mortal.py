"""Workers that die; nothing heavy is imported, since each process of a cluster does it again."""

from __future__ import annotations

import os
import signal


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
