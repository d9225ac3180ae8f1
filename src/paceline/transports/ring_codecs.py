"""Codecs on a ring of ranks: torch's own communication hooks where it has one, ours by gather where it has none.

`fp16`, `lowrank` and, on GPUs, `bf16` add up on their way round; `int8`, `sign` and `topk` do not, so each payload is
carried to everybody, and the cost grows with the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.codebook import build_codec, parse_codec
from paceline.interfaces import Codec
from paceline.tasks.timing import one_vector

FIRST_LOW_RANK = 3
"""Rounds before it that torch's hook sends whole: its buckets are made anew after the first."""


class Gathered:
    """What one rank sends and everybody adds up: the payloads of all, decoded, and their mean."""

    def __init__(self, codec: Codec, key: int, device: torch.device) -> None:
        self._codec, self._memory = codec, codec.start(key)
        room = -(-codec.capacity // 8) * 8
        self._payloads = torch.zeros(dist.get_world_size(), room, dtype=torch.uint8, device=device)
        self._own = torch.zeros(room, dtype=torch.uint8, device=device)
        self._decoded: Tensor | None = None

    def send(self, update: Tensor) -> Any:
        """Encode `update`, and begin to carry it to everybody."""
        self._codec.encode(update, self._memory, self._own)
        return dist.all_gather(list(self._payloads.unbind(0)), self._own, async_op=True)

    def mean(self, out: Tensor) -> None:
        """When all is there: the mean of what everybody sent, summed in the order of ranks."""
        if self._decoded is None:
            self._decoded = torch.empty_like(out)
        payloads = self._payloads[:, : self._codec.capacity]
        self._codec.decode(payloads[0], out)
        for payload in payloads[1:]:
            self._codec.decode(payload, self._decoded)
            out.add_(self._decoded)
        out.div_(len(payloads))


class GatherBuckets:
    """A communication hook of DistributedDataParallel: each bucket is encoded as one vector, with its own memory."""

    def __init__(self, text: str, key: int) -> None:
        self._text, self._key = text, key
        self._gathered: dict[tuple[int, int], Gathered] = {}

    def exchange(self, bucket: Any) -> Any:
        """The hook: a future of the bucket's mean."""
        buffer = bucket.buffer()
        place = (bucket.index(), buffer.numel())  # buckets are made anew after the first round
        if place not in self._gathered:
            codec = build_codec(self._text, one_vector(buffer.numel()), buffer.device)
            self._gathered[place] = Gathered(codec, self._key + bucket.index(), buffer.device)
        gathered = self._gathered[place]

        def add_up(future: Future[Any]) -> Any:
            future.value()  # raises what went wrong on the way
            gathered.mean(buffer)
            return buffer

        return gathered.send(buffer).get_future().then(add_up)


def compress(parallel: DistributedDataParallel, text: str, key: int) -> None:
    """Have `parallel` exchange its buckets by the codec `text`."""
    name, number = parse_codec(text)
    if name == "lowrank":
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=int(number), start_powerSGD_iter=FIRST_LOW_RANK,
            batch_tensors_with_same_shape=True,
        )  # fmt: skip
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name == "fp16":
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "bf16" and dist.get_backend() == "nccl":
        parallel.register_comm_hook(None, default_hooks.bf16_compress_hook)
    else:
        buckets = GatherBuckets(text, key)
        parallel.register_comm_hook(None, lambda state, bucket: buckets.exchange(bucket))
