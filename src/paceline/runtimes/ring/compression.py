"""Codecs on a ring of ranks: an all-reduce of values in 16 bits, an all-gather of payloads for fewer.

If values can be summed on the way (`lowrank`, `fp16`, and on GPUs `bf16`), what a rank sends does not depend on the
number of ranks. Other payloads are gathered, so the cost grows with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.codecs.lowrank import LowRank
from paceline.core.worker import one_vector
from paceline.interfaces import Codec, Layout
from paceline.settings.codecs import build_codec, codec_of


class GatheredPayloads:
    """Gathers the payloads of all ranks, decodes them and takes their mean."""

    def __init__(self, codec: Codec, key: int, device: torch.device) -> None:
        self._codec, self._memory = codec, codec.start(key)
        room = -(-codec.capacity // 8) * 8
        self._payloads = torch.zeros(dist.get_world_size(), room, dtype=torch.uint8, device=device)
        self._own = torch.zeros(room, dtype=torch.uint8, device=device)
        self._decoded: Tensor | None = None

    def send(self, update: Tensor) -> Any:
        """Encode `update` and start the all-gather."""
        self._codec.encode(update, self._memory, self._own)
        return dist.all_gather(list(self._payloads.unbind(0)), self._own, async_op=True)

    def mean(self, out: Tensor) -> None:
        """After the all-gather: write the mean of all payloads to `out`, summed in the order of ranks."""
        if self._decoded is None:
            self._decoded = torch.empty_like(out)
        payloads = self._payloads[:, : self._codec.capacity]
        self._codec.decode(payloads[0], out)
        for payload in payloads[1:]:
            self._codec.decode(payload, self._decoded)
            out.add_(self._decoded)
        out.div_(len(payloads))


class RoundedSum:
    """All-reduces the mean in 16 bits: v = u / n + e;  sent = round16(v);  e = v - sent, and the sum of all `sent`.

    So what a rank's rounding leaves out is sent later (error feedback). The sums on the way are rounded too, without
    feedback. A value beyond the range of the type becomes infinite, which ends the run.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._error = torch.zeros(numel, device=device)
        self._sent = torch.zeros(numel, dtype=dtype, device=device)

    def send(self, update: Tensor) -> Any:
        """Round `update`, whose memory is free from now on, and start the all-reduce."""
        self._sent.copy_(update.div_(dist.get_world_size()).add_(self._error))
        torch.sub(update, self._sent, out=self._error)
        return dist.all_reduce(self._sent, async_op=True)

    def mean(self, out: Tensor) -> None:
        """After the all-reduce: write the mean to `out`."""
        out.copy_(self._sent)


def exchange_of(text: str, layout: Layout, key: int, vector: Tensor, adds: bool) -> tuple[Tensor, Callable[[], None]]:
    """Return the tensor for the mean of all ranks' `vector`, and the function that computes it by the codec `text`.

    With `adds` (low rank only) the next gradient is added to the vector: what was not sent stays there, so error
    feedback needs no memory and no pass of its own.
    """
    codec = build_codec(text, layout, vector.device)
    if isinstance(codec, LowRank):
        memory, out = codec.start(key), torch.empty_like(vector) if adds else vector
        if adds:
            memory["error"] = vector

        def reduce() -> None:
            if not adds:
                memory["error"].add_(vector)
            codec.reduce(memory, out, lambda part: dist.all_reduce(part.div_(dist.get_world_size())))

        return out, reduce
    gathered = GatheredPayloads(codec, key, vector.device)

    def exchange() -> None:
        gathered.send(vector).wait()
        gathered.mean(vector)

    return vector, exchange


class EncodedBuckets:
    """A communication hook of DistributedDataParallel that encodes each bucket as one vector with its own memory."""

    def __init__(self, text: str, key: int) -> None:
        self._text, self._key = text, key
        self._exchanges: dict[tuple[int, ...], GatheredPayloads | RoundedSum] = {}

    def exchange(self, bucket: Any) -> Any:
        """The hook: return a future of the bucket's mean."""
        buffer = bucket.buffer()
        # DDP rebuilds its buckets after the first round, perhaps with the parameters in another order
        place = tuple(parameter.data_ptr() for parameter in bucket.parameters())
        if place not in self._exchanges:
            self._exchanges[place] = self._begin(buffer, bucket.index())
        exchange = self._exchanges[place]

        def add_up(future: Future[Any]) -> Any:
            future.value()  # raises the error of the exchange, if any
            exchange.mean(buffer)
            return buffer

        return exchange.send(buffer).get_future().then(add_up)

    def _begin(self, buffer: Tensor, index: int) -> GatheredPayloads | RoundedSum:
        name = codec_of(self._text).name
        if name == "fp16" or (name == "bf16" and dist.get_backend() == "nccl"):  # Gloo adds no bf16
            dtype = torch.float16 if name == "fp16" else torch.bfloat16
            return RoundedSum(buffer.numel(), dtype, buffer.device)
        codec = build_codec(self._text, one_vector(buffer.numel()), buffer.device)
        return GatheredPayloads(codec, self._key + index, buffer.device)


def travels_whole(text: str | None) -> bool:
    """Whether a codec's payload is so small that it is sent once after backward instead of in buckets during it.

    Buckets cost two copies and a call each; they hide the time of the transfer.
    """
    return text is not None and codec_of(text).name in ("lowrank", "sign", "topk")


def compress(parallel: DistributedDataParallel, text: str, key: int) -> None:
    """Make `parallel` exchange its buckets with the codec `text`."""
    buckets = EncodedBuckets(text, key)
    parallel.register_comm_hook(None, lambda state, bucket: buckets.exchange(bucket))
