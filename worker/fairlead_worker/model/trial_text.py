"""Texts on which computations of a model are compared: trained weights see other numbers in text than in random tokens."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from transformers import PreTrainedModel

from fairlead_worker.kernels.base import KVSpec, LayerSpec, PackedStep, StepContext
from fairlead_worker.kernels.reference import ReferenceBackend
from fairlead_worker.kernels.states import RecurrentStep
from fairlead_worker.model.exact import widened
from fairlead_worker.weights.tokenizer import load_tokenizer

TEXTS = (
    "The harbour was quiet that morning. Two boats had left before sunrise, and the rest lay at the pier, waiting for the fog to lift.",
    "def mean(values):\n    return sum(values) / len(values)\n\nprint(mean([3, 5, 10]))",
    "Question: What is 12 + 30?",
)
LENGTHS = (23, 16, 4)
"""Tokens taken of each text."""
STEPS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((0, 0, 21), (1, 0, 9)),
    ((0, 21, 1), (1, 9, 6), (2, 0, 3)),
    ((2, 3, 1), (0, 22, 1), (1, 15, 1)),
)
"""Rows as (text, start, count): prompts; a decode beside a later chunk and a new prompt; decodes. Together all tokens of all texts."""
ENDS = torch.tensor([sum(LENGTHS[: text + 1]) - back for text in range(len(LENGTHS)) for back in (3, 2, 1)])
"""Where the last tokens of all texts are in a step of all texts: they attend to all others."""
LIKELY = 256
"""The likeliest tokens of a position, whose log-probabilities are compared. A change of any other token moves these too."""

logger = logging.getLogger(__name__)


class NotFinite(Exception):
    """A model's answer is not a number."""


@dataclass(frozen=True, slots=True, eq=False)
class TrialText:
    """The tokens of `TEXTS`."""

    tokens: tuple[torch.Tensor, ...]
    """Of each text, [length] int64."""

    @classmethod
    def from_folder(cls, folder: Path, vocabulary: int) -> Self:
        """Tokenize with the model's tokenizer. Without one, or with one of another vocabulary, tokens are random."""
        known = [ids for ids in _tokenize(folder) if ids and max(ids) < vocabulary]
        if len(known) < len(TEXTS):
            return cls.random(vocabulary)
        return cls(tuple(torch.tensor((ids * length)[:length]) for ids, length in zip(known, LENGTHS, strict=True)))

    @classmethod
    def random(cls, vocabulary: int) -> Self:
        generator = torch.Generator().manual_seed(5)
        return cls(tuple(torch.randint(vocabulary, (length,), generator=generator) for length in LENGTHS))

    def step(self, rows: Sequence[tuple[int, int, int]], page_size: int, device: torch.device) -> PackedStep:
        """Return one step of `rows`, in the form of `STEPS`. Every token samples. Text t has the pages after those of text t - 1."""
        sizes = [-(-length // page_size) for length in LENGTHS]
        first = [sum(sizes[:text]) for text in range(len(sizes))]
        where = [torch.arange(start, start + count) for _, start, count in rows]
        pages = [-(-(start + count) // page_size) for _, start, count in rows]
        positions = torch.cat(where)
        return PackedStep(
            tokens=torch.cat([self.tokens[text][start : start + count] for text, start, count in rows]).to(device),
            positions=positions.to(device),
            slots=torch.cat([first[text] * page_size + at for (text, _, _), at in zip(rows, where, strict=True)]).to(device),
            starts=[start for _, start, _ in rows],
            counts=[count for _, _, count in rows],
            page_indptr=torch.tensor([0, *pages]).cumsum(0).to(torch.int32),
            page_indices=torch.cat([first[text] + torch.arange(many) for (text, _, _), many in zip(rows, pages, strict=True)]).int(),
            sampling=torch.arange(len(positions), device=device),
        )

    def whole(self, page_size: int, device: torch.device) -> PackedStep:
        """Return one step of all texts."""
        return self.step([(text, 0, length) for text, length in enumerate(LENGTHS)], page_size, device)


def trial_pages(page_size: int) -> int:
    """Return the number of pages that the steps of a `TrialText` take."""
    return sum(-(-length // page_size) for length in LENGTHS)


def places(rows: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """Return where the tokens of a step of `rows` are in `TrialText.whole`, [T] int64."""
    return torch.cat([sum(LENGTHS[:text]) + torch.arange(start, start + count) for text, start, count in rows])


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """What a model says to a `TrialText` in float32. P = all tokens of the text, K = `LIKELY` or the vocabulary."""

    text: TrialText
    likely: torch.Tensor
    """[P, K] int64: the likeliest tokens of each position."""
    logprobs: torch.Tensor
    """[P, K] float32: their log-probabilities."""

    @classmethod
    def compute(cls, model: PreTrainedModel, layers: tuple[LayerSpec, ...], text: TrialText) -> Self:
        """Run `model`, set to the paged attention function, in float32.

        If its family's code does not run in float32, it runs in its own dtype. Then nothing may replace it that does not give its numbers.
        Raises NotFinite.
        """
        try:
            with widened(model):
                logits = run_whole(model, layers, text, torch.float32)
        except Exception as error:  # whatever a family's own code raises
            logger.warning("%s does not run in float32, so other computations are not taken for it: %s", type(model).__name__, error)
            logits = run_whole(model, layers, text, model.dtype)
        logprobs, likely = logits.float().log_softmax(-1).topk(min(LIKELY, logits.shape[1]))
        if not logprobs[:, 0].isfinite().all():
            raise NotFinite("its weights give numbers that are not finite on a short text: fetch or convert it again")
        return cls(text, likely, logprobs)

    def take(self, logits: torch.Tensor, at: torch.Tensor | None = None) -> torch.Tensor:
        """Return the log-probabilities of the likely tokens, [n, K] float32, by `logits` [n, vocabulary] of positions `at`; None: all."""
        likely = self.likely if at is None else self.likely[at.to(self.likely.device)]
        return logits.float().log_softmax(-1).gather(1, likely)


@torch.inference_mode()
def run_whole(
    model: PreTrainedModel, layers: tuple[LayerSpec, ...], text: TrialText, dtype: torch.dtype, at: torch.Tensor | None = None
) -> torch.Tensor:
    """Return logits [n, vocabulary] of `model` for the tokens `at` of the text, on its device (None: all), with KV in `dtype`."""
    page_size = 16
    spec = KVSpec(layers, page_size, dtype, model.device)
    step = text.whole(page_size, model.device)
    context: StepContext = RecurrentStep(ReferenceBackend(spec, trial_pages(page_size)).plan(step), step, None)
    kept = step.sampling if at is None else at
    logits: torch.Tensor = model(
        input_ids=step.tokens[None], position_ids=step.positions[None], use_cache=False, logits_to_keep=kept, step=context
    ).logits[0]
    return logits


def _tokenize(folder: Path) -> list[list[int]]:
    """Return the ids of each text; none if there is no tokenizer, which the engine reports later, or if it does not know the letters."""
    try:
        return [load_tokenizer(folder).backend_tokenizer.encode(text).ids for text in TEXTS]
    except Exception:  # transformers raises many kinds, and tokenizers plain Exception
        return []
