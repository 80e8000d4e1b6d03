"""The sampler on a GPU: a step's rows are chosen from together, where their logits are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.kernels.triton.rejection import Drafts, reject
from engine.kernels.triton.sampling import Draws, sample
from engine.sampling.sampler import GREEDY_BELOW, Sampler, SampleRow

SEEDS = 1 << 63


class DeviceSampler(Sampler):
    """Draws by Philox, where the CPU inverts sums: a seed gives the same tokens again, in any batch, but not
    those that the CPU gives. Of equal logits at the edge of top-k or top-p all are kept."""

    def _choose(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        drawn = [i for i, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
        if not drawn:
            return self._argmax(logits)
        draws = self._draws(rows, logits.device)
        tokens: list[int] = sample(logits, draws).tolist()
        verified = [i for i in drawn if rows[i].drawn is not None]
        if verified:
            for i, token in zip(verified, self._verified(logits, rows, verified, draws), strict=True):
                tokens[i] = token
        return tokens

    def _verified(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], places: list[int], draws: Draws
    ) -> list[int]:
        """Of the rows at ``places`` the draft, where it is accepted, else a token in its place."""
        drawn = [row.drawn for row in (rows[i] for i in places) if row.drawn is not None]
        count, device = len(places), logits.device
        zeros = torch.zeros(count, dtype=torch.int32, device=device)
        drafts = Drafts(
            tokens=torch.tensor([draft.token for draft in drawn], dtype=torch.int32, device=device),
            start=torch.arange(count + 1, dtype=torch.int32, device=device),
            greedy=zeros,
            bonus=zeros,  # the token behind the draft has a row of its own
            seed=draws.seed[places],
            position=draws.position[places],
            probs=torch.stack([draft.distribution for draft in drawn]),
        )
        target = self._target(logits[places], [rows[i] for i in places])
        found: list[int] = reject(target, drafts, 1)[0][:, 0].tolist()
        return found

    def _draws(self, rows: Sequence[SampleRow], device: torch.device) -> Draws:
        """The rows' parameters, in one copy: seeds first, whose 8 bytes must lie aligned."""
        # Filled up to 16 bytes: Triton compiles a kernel anew for pointers that are aligned otherwise.
        rows = [*rows, *list(rows[:1]) * (-len(rows) % 4)]
        params = [row.params for row in rows]
        seeds = [self._seed(row) for row in rows]
        whole = [[p.top_k if p.top_k > 0 else 0 for p in params], [row.position for row in rows]]
        real = [
            [p.temperature if p.temperature >= GREEDY_BELOW else 0.0 for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
        ]
        flat = np.concatenate(
            (
                np.array(seeds, dtype=np.int64).view(np.int32),
                np.array(whole, dtype=np.int32).ravel(),
                np.array(real, dtype=np.float32).view(np.int32).ravel(),
            )
        )
        on_device = torch.from_numpy(flat).to(device)
        count = len(rows)
        top_k, position, *reals = on_device[2 * count :].split(count)
        temperature, top_p, min_p = (numbers.view(torch.float32) for numbers in reals)
        seed = on_device[: 2 * count].view(torch.int64)
        return Draws(temperature, top_k, top_p, min_p, seed, position)

    def _seed(self, row: SampleRow) -> int:
        """The request's, or for one without any a new one for each token."""
        if row.params.seed is None:
            return int(self._random.integers(SEEDS))
        return row.params.seed % SEEDS
