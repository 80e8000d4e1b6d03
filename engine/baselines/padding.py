"""Static batching's padding, made into something that a runner computes."""

from __future__ import annotations

from collections.abc import Iterator

from engine.kv.blocks import NULL_BLOCK
from engine.request import Request, SamplingParams
from engine.step import ScheduledRequest, StepPlan


def padding_sequences(plan: StepPlan, block_size: int) -> Iterator[ScheduledRequest]:
    """A sequence of zeros for each of the plan's paddings, in the null block, that emits nothing.

    It goes through every layer as the padding of a [members, longest] tensor does. Its keys and values
    overwrite each other, and no request reads them. Only the head, which a padded batch computes for ended
    members too, is left out.
    """
    for length in plan.padding:
        request = Request("padding", [0] * length, SamplingParams())
        request.block_ids = [NULL_BLOCK] * -(-length // block_size)
        yield ScheduledRequest(request, start=0, num_tokens=length, emits=False)
