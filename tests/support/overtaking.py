"""Two threads, of which the second runs while the first is held at a place."""

import threading

from devices import PATIENCE


class Held:
    """A place where the first thread is held: it calls `wait` there."""

    def __init__(self):
        self._arrived, self._go = threading.Event(), threading.Event()

    def wait(self):
        self._arrived.set()
        assert self._go.wait(PATIENCE)

    def run(self, first, second):
        """Call `first` in a thread until it is held, then `second` in another for a moment, then let the first go on;
        returns after both."""
        threads = [threading.Thread(target=call) for call in (first, second)]
        threads[0].start()
        assert self._arrived.wait(PATIENCE)
        threads[1].start()
        threads[1].join(0.05)
        self._go.set()
        for thread in threads:
            thread.join(PATIENCE)
