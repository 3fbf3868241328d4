"""Who asks what a rank holds is answered from its books, as soon as somebody knows.

What is asked while the first events are still on their way waits for them. Nothing is posted inside `ask` that comes
before the books are filled, and every question is answered exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from executors.engines.kv_books import KvBooks
from executors.engines.kv_wire import Said
from policies.cluster.actions import RequestIndexDump, RequestIndexReplay
from policies.cluster.events import Event
from policies.cluster.ids import Tier


class KvTeller:
    """The books of some ranks of one worker, between who hears of their blocks and who asks for them. `now` is the
    world's clock."""

    def __init__(self, books: Sequence[KvBooks], post: Callable[[Event], None], now: Callable[[], float]) -> None:
        self.books = {one.rank.dp_rank: one for one in books}
        self.now = now
        self.heard_s: float | None = None  # as protocol.KvFollower says
        self._post = post
        self._why_not: dict[int, str | None] = {}  # of ranks that are known about
        self._asked: list[RequestIndexReplay | RequestIndexDump] = []

    def ask(self, action: RequestIndexReplay | RequestIndexDump) -> None:
        self._asked.append(action)
        self._answer()

    @property
    def device_blocks(self) -> int:
        """Blocks on the device, over all ranks; one that is held twice counts twice."""
        held: Counter[Tier] = Counter()
        for one in self.books.values():
            held += one.copies()
        return held[Tier.G1_DEVICE]

    def heard(self) -> None:
        """The engine said something, if only that there is no more."""
        self.heard_s = self.now()

    def tell(self, books: KvBooks, said: Iterable[Said]) -> None:
        """Enter what an engine said, and post what follows."""
        for event in books.take(said, self.now()):
            self._post(event)

    def void(self, books: KvBooks, why: str) -> None:
        """Something was lost for good."""
        self._post(books.void(why, self.now()))

    def restarted(self, books: KvBooks) -> None:
        """The rank began anew, with nothing."""
        self._post(books.restarted(self.now()))

    def knows(self, books: KvBooks, why_not: str | None = None) -> None:
        """The beginning has been heard, or cannot be: whoever waits is answered."""
        self._why_not[books.rank.dp_rank] = why_not
        self._answer()

    def _answer(self) -> None:
        now = [action for action in self._asked if action.dp_rank in self._why_not]
        self._asked = [action for action in self._asked if action.dp_rank not in self._why_not]
        for action in now:
            self._post(self.books[action.dp_rank].answer(action, self.now(), self._why_not[action.dp_rank]))
