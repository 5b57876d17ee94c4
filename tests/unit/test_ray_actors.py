"""What the actors of the Ray target do, without Ray: their methods are called here, in orders that Ray may choose."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

import gradquorum as gq
from gradquorum.receipts import ApplyReceipt, ApplyStatus
from gradquorum.specs import Options, RoundSpec
from gradquorum.targets.interface import Terms
from gradquorum.targets.ray.ground import Ground
from gradquorum.targets.ray.losses import Losses
from gradquorum.targets.ray.pipeline import SubmittingTarget
from gradquorum.targets.ray.planning import RemoteReducer, Shards, compacted
from gradquorum.targets.ray.queue import TakeQueue
from gradquorum.targets.ray.records import Judged, Offer, OfferedContent, Part, Recorded, Resumed
from gradquorum.targets.ray.sending import Prepared
from gradquorum.targets.ray.shard import Shard
from gradquorum.targets.ray.wire import pack_rows

SPEC = RoundSpec("sparse", {"": gq.SparseSpec("float64", (1000, 1), "SUM")}, Options())
TOKEN = b"me"


def recorded(incarnation):
    return Recorded(incarnation, 0, 0, 0, {}, {}, (), {})


def put(shard, incarnation, number, *ids):
    """Put a gradient of ones on a shard."""
    rows = Part(len(ids), (1,), (np.array(ids), np.ones(len(ids))))
    return shard.put(incarnation, TOKEN, *pack_rows([((TOKEN, number), {0: rows})]))


def test_shard_that_is_told_late_to_begin_an_older_incarnation_keeps_what_it_holds():
    async def run():
        shard = Shard(SPEC, 0, 1)
        await shard.begin(recorded(7))
        assert await put(shard, 7, 0, 1) is None
        await shard.begin(recorded(6))
        assert await shard.num_held() == 1
        assert (await shard.recall()).incarnation == 7
        assert await put(shard, 7, 1, 2) is None
        await shard.begin(recorded(8))
        assert await shard.num_held() == 0

    asyncio.run(run())


def test_keys_of_compactions_are_of_one_incarnation():
    # By the clock: an incarnation is as many nanoseconds after another one as it takes to begin.
    before, after = (Shards((), incarnation, None, None) for incarnation in (10**18, 10**18 + 10**6))
    assert not {before.new_key() for _ in range(1000)} & {after.new_key() for _ in range(1000)}


class Actor:
    """Stands in for a handle of Ray's on a shard."""

    def __init__(self, shard):
        self._shard = shard
        self.asked = []

    def __getattr__(self, method):
        def remote(*arguments):
            self.asked.append(method)
            return getattr(self._shard, method)(*arguments)

        return SimpleNamespace(remote=remote)


@pytest.mark.parametrize(
    ("growth", "asked"),
    [
        pytest.param(1.2, [1, 2], id="more than the second shard's, less than that of both"),
        pytest.param(1.8, [1, 1], id="more than that of both, less than the first shard's"),
        pytest.param(0.9, [1, 1], id="less than that of each"),
        pytest.param(9.0, [1, 1], id="more than that of each"),
    ],
)
def test_log_is_compacted_on_all_shards_or_on_none(monkeypatch, growth, asked):
    """Of the first shard every row comes twice, of the second none: its log is 1.0 times its distinct rows."""
    shards = [Shard(SPEC, i, 2) for i in range(2)]
    actors = [Actor(shard) for shard in shards]

    def wait(calls):
        async def together():
            return await asyncio.gather(*calls)

        return asyncio.run(together())

    monkeypatch.setattr(Shards, "answers", lambda self, calls: wait(calls))  # the real one asks Ray who has died
    there = Shards(actors, 1, (500,), wait)
    wait([shard.begin(recorded(1)) for shard in shards])
    reducer, blocks, leases = RemoteReducer(SPEC, 0, there), [], []
    for number in range(2):
        low, high = range(100), range(500 + 100 * number, 600 + 100 * number)
        wait([put(shards[0], 1, number, *low), put(shards[1], 1, number, *high)])
        leases.append(there.offered((TOKEN, number), (0, 1)))
        content = OfferedContent((TOKEN, number), (0, 1), 200 * 16, True, (1,), ())
        blocks.append(reducer.block(content))
    num_bytes = sum(block.num_bytes for block in blocks)
    compact, distinct = compacted(there, [reducer], [blocks], num_bytes, growth)
    assert distinct == 300 * 16
    assert [actor.asked.count("compact") for actor in actors] == asked
    is_worth_it = num_bytes > growth * distinct
    assert (compact is not None) == is_worth_it
    if is_worth_it:
        plan = reducer.merge(compact, (1,), 2)
        merged = [result[0] for result in wait([shard.merge(1, [plan]) for shard in shards])]
        np.testing.assert_array_equal(
            np.concatenate([values for _, values, _ in merged]).ravel(), [2] * 100 + [1] * 200
        )
    else:
        assert [shards for _, shards in there.freed] == [(0, 1)]  # what one of them may hold


def lost(worker, *sequences):
    """Return losses of a worker that nobody has heard of yet."""
    losses = Losses()
    for sequence in sequences:
        receipt = ApplyReceipt(ApplyStatus.ACCEPTED, 0, 0, 1)
        losses.note(Terms(0, worker, sequence), Judged(receipt, 0, 0, None), 7, 1)
    losses.void(1, Resumed(2, "it died", {}, None, is_durable=False))
    return losses


class Sender:
    """Stands in for the sender of a pipeline: notes what is offered, and how."""

    def __init__(self, losses):
        self.losses = losses
        self.offered = []

    def prepare(self, gradients, terms, *, keep):
        return Prepared(Offer((TOKEN, 0), (), (), terms), {})

    def renewed(self, prepared):
        return prepared

    def send(self, seen, prepared):
        self.offered.append([one.offer.terms.sequence for one in prepared])
        raise RuntimeError("no coordinator")

    def insist(self, prepared, thread):
        self.losses.report("it died", prepared.offer.terms.worker)
        self.offered.append(prepared.offer.terms.sequence)
        return ApplyReceipt(ApplyStatus.ACCEPTED, 0, 0, 1)


def test_pipeline_offers_nothing_newer_before_its_worker_has_heard_what_is_lost():
    losses = lost("a", 3, 4)
    sender = Sender(losses)
    client = SimpleNamespace(incarnation=2, losses=losses, join=lambda worker: None)
    pipeline = SubmittingTarget(sender, client, 4)
    first = pipeline.apply((), Terms(0, "a", 5))
    with pytest.raises(gq.UnavailableError) as caught:
        first.result(30)
    assert caught.value.resend == (("a", 3), ("a", 4))
    assert sender.offered == []
    assert pipeline.apply((), Terms(0, "a", 3)).result(30).status is ApplyStatus.ACCEPTED
    pipeline.close()
    assert sender.offered == [[3], 3]


def test_delivery_is_answered_again_only_when_the_first_one_is_recorded():
    async def run():
        may_record = asyncio.Event()

        async def record():
            await may_record.wait()

        ground = Ground(None)
        ground.settle([], 0, (TOKEN, 1), is_final=True)  # where a first call is, which waits for the shards
        queue = TakeQueue(SimpleNamespace(ground=ground, record=record), {})
        again = asyncio.ensure_future(queue.deliver(TOKEN, 1, True))
        _, pending = await asyncio.wait([again], timeout=0)
        assert pending
        may_record.set()
        assert await again is None

    asyncio.run(run())
