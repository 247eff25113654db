"""Captures vLLM's rows by request, with a global logits processor for its runners V1 and V2.

A row is matched to its request by the ticket in ``SamplingParams.extra_args``, never by its position in
the batch. On a CPU, the V1 runner's samples are drawn here too, each from ``(seed, tokens before it)``:
vLLM's CPU sampler draws from the process's generator, whether or not a request has a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor as V1LogitsProcessor
from vllm.v1.sample.logits_processor import MoveDirectionality
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor

from genrt.engines.vllm.requests import MASKED, PROCESSED, SEED, TICKET, Masked
from genrt.errors import EngineUnsupported
from genrt.tokens.rows import AsyncHostCopy, corrected, moved, normalised
from genrt.tokens.sampling import GREEDY_BELOW, mixed
from genrt.tokens.sets import DescribedSets, DrawnFrom, MaskForm, divisors_of

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor import BatchUpdate
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext


@torch.inference_mode()
def log_probabilities(logits: torch.Tensor, *, may_overwrite: bool = False) -> torch.Tensor:
    """Return the rows ``[n, vocab_size]`` of ``logits``. With ``may_overwrite`` they overwrite float32
    logits on a CPU, so no second tensor of this size is allocated."""
    # On a GPU, vLLM's batch-invariant mode replaces only the kernel that does not overwrite.
    if logits.is_cuda or not may_overwrite:
        return normalised(logits)
    wide = logits.float()
    return corrected(torch.log_softmax(wide, dim=-1, out=wide))


class FiniteCheck:
    """Finds the rows ``[n, vocab_size]`` with logits that are not finite, while the host continues."""

    def __init__(self, rows: torch.Tensor) -> None:
        # One NaN, one +inf, or -inf alone among the logits makes every entry of the row NaN.
        self._first = rows[:, 0]
        self._sum = AsyncHostCopy(self._first.sum())

    def wait(self) -> set[int]:
        """Wait for the device; return the positions of rows that are not finite."""
        if not math.isnan(self._sum.result().item()):
            return set()
        return set(self._first.isnan().nonzero()[:, 0].tolist())


class RowStore:
    """Holds the rows ``[vocab_size]`` that have been computed and not yet taken, by ticket."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[torch.Tensor, int]] = {}

    def put(self, tickets: Sequence[int], logits: torch.Tensor) -> None:
        """Store the rows of ``logits`` ``[len(tickets), vocab_size]``. A later row of a ticket replaces
        the earlier one, which was of a prompt's first part."""
        rows = log_probabilities(logits)
        for position, ticket in enumerate(tickets):
            self._rows[ticket] = (rows, position)

    def take(self, tickets: Iterable[int]) -> list[torch.Tensor | None]:
        """Remove each ticket's row and return it, a view into the step's rows, for the current stream.

        A row is ``None`` where the logits were not finite.

        Raises:
            EngineUnsupported: a request finished without a row, because vLLM skipped the processor.
        """
        not_finite: dict[int, set[int]] = {}
        taken: list[torch.Tensor | None] = []
        for ticket in tickets:
            try:
                rows, position = self._rows.pop(ticket)
            except KeyError:
                raise EngineUnsupported(
                    "vLLM finished a request without passing its logits to genrt's processor; this "
                    "version or configuration of vLLM is not supported"
                ) from None
            if id(rows) not in not_finite:
                if rows.is_cuda:  # allocated on vLLM's stream, read on this one
                    rows.record_stream(torch.cuda.current_stream(rows.device))
                not_finite[id(rows)] = FiniteCheck(rows).wait()
            taken.append(None if position in not_finite[id(rows)] else rows[position])
        return taken

    def forget(self, tickets: Iterable[int]) -> None:
        """Forget the rows of cancelled requests, if there are any."""
        for ticket in tickets:
            self._rows.pop(ticket, None)

    def __len__(self) -> int:
        return len(self._rows)


class MaskedRows(NamedTuple):
    """The rows of a step whose texts want the sets that their tokens are drawn from: by row, in rising
    order, the ticket of its text, the place of the token in it, and the temperature."""

    rows: list[int]
    tickets: list[int]
    places: list[int]
    heats: list[float]


class DrawnSets:
    """The sets that texts' tokens were drawn from and that have not been taken, by ticket and place."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[DescribedSets, int]] = {}
        self._heats: tuple[list[float], torch.Tensor | None] = [], None  # of the last step

    def put(
        self,
        drawn: MaskedRows,
        laws: torch.Tensor,
        rows: torch.Tensor,
        token_ids: torch.Tensor,
    ) -> None:
        """Store the sets of these rows' draws. A draw at an earlier place replaces that one: it
        is of a prompt's first part, or vLLM has discarded the earlier one.

        Args:
            laws: the logits that tokens are drawn by, ``[n, vocab_size]``, or their log-probabilities.
            rows: the model's log-probabilities; on a GPU, its logits will do.
            token_ids: the tokens, int64 ``[n]``.
        """
        if drawn.heats != self._heats[0]:
            self._heats = drawn.heats, divisors_of(drawn.heats, laws.device)
        step = DescribedSets(laws, rows, self._heats[1], token_ids)
        draws = zip(drawn.tickets, drawn.places, strict=True)
        self._found.update(zip(draws, zip(repeat(step), range(len(laws))), strict=True))

    def take(self, ticket: int, start: int, count: int, form: MaskForm) -> list[DrawnFrom]:
        """Remove the sets of ``count`` places of a text from ``start`` on, and return them."""
        found = self._found
        try:
            if count == 1:  # as in most steps
                step, row = found.pop((ticket, start))
                return [step.places(form)[row]]
            taken = [found.pop((ticket, place)) for place in range(start, start + count)]
        except KeyError:
            raise EngineUnsupported(
                "vLLM drew a token without genrt's view of its sampler; this version or configuration of "
                "vLLM has no sampling_mask"
            ) from None
        return [step.places(form)[row] for step, row in taken]

    def forget(self, tickets: Iterable[int]) -> None:
        """Forget the sets of texts that have ended."""
        gone = set(tickets)
        for key in [each for each in self._found if each[0] in gone]:
            del self._found[key]

    def __len__(self) -> int:
        return len(self._found)


def _mark(params: Any, key: str) -> Any:
    return (params.extra_args or {}).get(key)


class _SeededText:
    """Numbers by which a text's tokens are drawn, all from one generator, as in vLLM. Draws that vLLM
    discards do not advance it: ``token_ids`` is the list that vLLM itself appends to."""

    def __init__(self, seed: int, token_ids: list[int]) -> None:
        self._seed, self._token_ids = seed, token_ids
        self._generator = torch.Generator()
        self._numbers: list[int] = []

    def number(self, ahead: int = 0) -> int:
        """Return the 31-bit number that seeds the draw of the next token, or of one further ``ahead``."""
        numbers, place = self._numbers, len(self._token_ids) + ahead
        while place >= len(numbers):
            if self._seed >= 2**32:  # a CPU generator uses 32 bits of a seed
                self._generator.manual_seed(mixed(self._seed, len(numbers)))
            elif not numbers:
                self._generator.manual_seed(self._seed)
            numbers += torch.randint(0, 2**31, (32,), generator=self._generator).tolist()
        return numbers[place]


class _BatchEntry(NamedTuple):
    """A request in V1's batch: its ticket, its seeded text, whether it wants its processed
    log-probabilities or its sets, and the list with its tokens, which vLLM appends to."""

    ticket: int | None
    text: _SeededText | None
    processed: bool
    masked: Masked | None
    token_ids: list[int]


class CaptureV1(V1LogitsProcessor):  # type: ignore[misc]
    """The capture for the V1 runner: it tracks rows through the moves of the persistent batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.store, self.sets = RowStore(), DrawnSets()
        self._batch: dict[int, _BatchEntry] = {}
        # By batch row, the tokens that this step draws before ``draw`` does; ``None``: none.
        self._ahead: Sequence[int] | None = None
        # The batch's tickets in order and their rows (``None``: all); valid until the batch changes.
        self._layout: tuple[list[int], torch.Tensor | None] | None = None

    def is_argmax_invariant(self) -> bool:
        """Return False, although this processor changes no logits. vLLM skips invariant processors for
        greedy batches, and gives them logits divided by the temperature."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        batch, self._layout = self._batch, None
        # vLLM's order: removed, added (also to places that were not removed), moved.
        for index in batch_update.removed:
            batch.pop(index, None)
        for index, params, _, token_ids in batch_update.added:
            seed = _mark(params, SEED)
            text = None if seed is None else _SeededText(seed, token_ids)
            wanted = bool(_mark(params, PROCESSED)), _mark(params, MASKED)
            batch[index] = _BatchEntry(_mark(params, TICKET), text, *wanted, token_ids)
        for source, target, direction in batch_update.moved:
            moved, replaced = batch.pop(source, None), batch.pop(target, None)
            if moved is not None:
                batch[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                batch[source] = replaced

    def processed_rows(self) -> list[int]:
        """Return the batch rows, in rising order, of requests that want processed log-probabilities."""
        return [index for index, entry in sorted(self._batch.items()) if entry.processed]

    def masked_rows(self) -> MaskedRows:
        """Return the batch rows of texts that want their sets."""
        found = MaskedRows([], [], [], [])
        for index, entry in sorted(self._batch.items()):
            if entry.masked is not None:
                found.rows.append(index)
                found.tickets.append(entry.masked.ticket)
                found.places.append(len(entry.token_ids))
                found.heats.append(entry.masked.temperature)
        return found

    def draw(
        self, logits: torch.Tensor, _: object, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        """Draw token ids ``[n]`` with each request's own randomness, in place of vLLM's CPU sampler."""
        ahead = self._ahead or [0] * len(logits)
        return self._drawn(logits, k, p, enumerate(ahead)), None

    def _drawn(
        self,
        logits: torch.Tensor,
        k: torch.Tensor | None,
        p: torch.Tensor | None,
        places: Iterable[tuple[int, int]],
    ) -> torch.Tensor:
        """Draw token ids ``[n]``, each for a batch row and the number of tokens drawn before it in this
        step."""
        entries = ((self._batch.get(index), ahead) for index, ahead in places)
        seeds = [e.text.number(ahead) if e and e.text else 0 for e, ahead in entries]
        logits = _truncated(logits, k, p)
        found: torch.Tensor = torch.ops._C.fused_gumbel_argmax(logits.float(), torch.tensor(seeds))
        return found

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._layout is None:
            tickets = {
                index: entry.ticket
                for index, entry in self._batch.items()
                if entry.ticket is not None
            }
            indices = sorted(tickets)
            is_all = not indices or indices == list(range(len(logits)))
            chosen = None if is_all else torch.tensor(indices, device=logits.device)
            self._layout = [tickets[index] for index in indices], chosen
        in_order, rows = self._layout
        if in_order:
            self.store.put(in_order, logits if rows is None else logits[rows])
        return logits


class VerifyingCaptureV1(CaptureV1):
    """The capture for a V1 runner whose texts have drafts. It installs itself, because vLLM refuses
    processors there, and sees the last row of every request.

    On a CPU it verifies drafts too: vLLM's kernels there lose temperature, top-k and top-p. Every token
    is drawn as without drafts, and the drafts that equal the draws save steps.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(None, runner.device, False)
        runner.input_batch.logitsprocs.non_argmax_invariant.append(self)
        self._sampler, self._verifier = runner.sampler, runner.rejection_sampler
        self._vllms, self._on_cpu = self._verifier.forward, runner.device.type == "cpu"
        self._verifier.forward = self.verify

    def verify(
        self, drafts: Any, probs: torch.Tensor | None, logits: torch.Tensor, sampling: Any
    ) -> Any:
        """Return the tokens of a step's requests, in place of vLLM's rejection sampler."""
        counts = drafts.num_draft_tokens
        if not any(counts):  # vLLM's top-k fails without a draft
            return self._sampler(logits, sampling)
        if not self._on_cpu:
            return self._vllms(drafts, probs, logits, sampling)
        logits = logits.float()
        of_drafts, last = drafts.target_logits_indices, drafts.bonus_logits_indices
        drawn = self._draw_each(logits[of_drafts], drafts, sampling).tolist()
        own, self._ahead = replace(sampling, max_num_logprobs=None), counts
        try:
            bonus = self._sampler(logits[last], own, predict_bonus_token=True).sampled_token_ids
        finally:
            self._ahead = None
        expected, at, kept = drafts.draft_token_ids.tolist(), 0, list[list[int]]()
        for count, [after] in zip(counts, bonus.tolist(), strict=True):
            ours, theirs = drawn[at : at + count], expected[at : at + count]
            right = next((n for n in range(count) if ours[n] != theirs[n]), count)
            found = [*ours, after][: right + 1]
            kept.append(found + [-1] * (drafts.max_spec_len - right))
            at += count
        token_ids = torch.tensor(kept, dtype=torch.int32)
        logprobs = None
        if sampling.max_num_logprobs is not None:
            rows = logits, logits[of_drafts], logits[last]
            logprobs = self._verifier._get_logprobs_tensors(
                sampling.max_num_logprobs, drafts, *rows, token_ids
            )
        return SamplerOutput(sampled_token_ids=token_ids, logprobs_tensors=logprobs)

    def _draw_each(self, logits: torch.Tensor, drafts: Any, sampling: Any) -> torch.Tensor:
        """Draw a token at the place of every draft: int64 ``[m]``."""
        logits = self._verifier.apply_logits_processors(logits, sampling, drafts)
        likeliest = logits.argmax(dim=-1)
        if sampling.all_greedy:
            return likeliest
        counts = drafts.num_draft_tokens
        requests = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))

        def of_each(numbers: torch.Tensor | None) -> torch.Tensor | None:
            return None if numbers is None else numbers[requests]

        heats = sampling.temperature[requests]
        is_greedy = heats < GREEDY_BELOW
        logits = logits / torch.where(is_greedy, 1.0, heats)[:, None]
        places = [(index, n) for index, count in enumerate(counts) for n in range(count)]
        cuts = of_each(sampling.top_k), of_each(sampling.top_p)
        return torch.where(is_greedy, likeliest, self._drawn(logits, *cuts, places))


class CaptureV2(V2LogitsProcessor):  # type: ignore[misc]
    """The capture for the V2 runner: rows are re-sorted every step, but requests keep their slot."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.store, self.sets = RowStore(), DrawnSets()
        # By slot; -1 for other requests.
        self._tickets = np.full(vllm_config.scheduler_config.max_num_seqs, -1, dtype=np.int64)
        self._masked = self._tickets.copy()  # tickets of texts that want their sets
        self._prompts = self._tickets.copy()  # the lengths of their prompts
        self._heats = np.ones(len(self._tickets))
        self._processed = np.zeros(len(self._tickets), dtype=bool)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        ticket = _mark(sampling_params, TICKET)
        self._tickets[req_idx] = -1 if ticket is None else ticket
        self._processed[req_idx] = bool(_mark(sampling_params, PROCESSED))
        masked = _mark(sampling_params, MASKED) or Masked(-1, 0, 1.0)
        self._masked[req_idx], self._prompts[req_idx], self._heats[req_idx] = masked
        return ticket is not None

    def processed_rows(self, slots: np.ndarray) -> np.ndarray:
        """Return the rows, int64 ``[n]``, that want processed log-probabilities, of a step's requests."""
        return np.flatnonzero(self._processed[slots])

    def masked_rows(self, slots: np.ndarray, lengths: np.ndarray) -> MaskedRows:
        """Return the rows, of a step's requests, of texts that want their sets. The texts have these
        lengths; rows inside prompts are left out."""
        tickets = self._masked[slots]
        if tickets.max(initial=-1) < 0:
            return MaskedRows([], [], [], [])
        places = lengths[: len(slots)] - self._prompts[slots]
        rows = np.flatnonzero((tickets >= 0) & (places >= 0))
        own = (each[rows].tolist() for each in (tickets, places, self._heats[slots]))
        return MaskedRows(rows.tolist(), *own)

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        slots = ctx.idx_mapping_np
        tickets = self._tickets[slots]
        places = np.flatnonzero(tickets >= 0)
        if not len(places):
            return logits
        every = len(places) == len(logits)
        self.store.put(
            tickets[places].tolist(),
            logits if every else logits[_first_rows(places, len(slots), ctx.expanded_local_pos)],
        )
        return logits


def _first_rows(places: np.ndarray, count: int, offsets: torch.Tensor) -> torch.Tensor:
    """Return the first row, on the device, of each of these places among a step's ``count`` requests: the
    row before its drafts. ``offsets`` ``[m]`` numbers the rows of each request from 0."""
    at = moved(torch.from_numpy(places), offsets.device)
    if count == len(offsets):
        return at
    begun = (offsets == 0).cumsum(0)  # how many requests have begun
    return torch.searchsorted(begun, at + 1)


def _truncated(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """Return logits ``[n, vocab_size]`` after vLLM's top-k and top-p, with its arguments. On a CPU, vLLM
    would drop tokens of probability 0 from rows without top-p too, if another row has it."""
    most = None if p is None else p.masked_fill(p >= 1.0, 2.0)
    found: torch.Tensor = apply_top_k_top_p(logits, k, most)
    return found


def _rows_of(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return these rows, in rising order; all rows without a copy."""
    if len(rows) == len(tensor):
        return tensor
    return tensor[moved(torch.tensor(rows), tensor.device)]


OTHER_SAMPLER = "this vLLM's sampler gathers log-probabilities otherwise"


class ProcessedLogprobsV1:
    """Wraps runner V1's sampler: computes the laws of tokens in draws. In gathers, it returns processed
    log-probabilities to requests that want them, and stores the sets of texts that want these. Raises
    EngineUnsupported for another sampler."""

    def __init__(self, sampler: Any, capture: CaptureV1) -> None:
        if not hasattr(sampler, "topk_topp_sampler") or not hasattr(sampler, "gather_logprobs"):
            raise EngineUnsupported(OTHER_SAMPLER)
        self._capture = capture
        self._laws: torch.Tensor | None = None  # the logits that a step's tokens are drawn by
        self._draw, self._gather = sampler.topk_topp_sampler.forward, sampler.gather_logprobs
        sampler.topk_topp_sampler.forward, sampler.gather_logprobs = self.draw, self.gather

    def draw(
        self,
        logits: torch.Tensor,
        generators: object,
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> Any:
        """Draw as the sampler does, from logits after temperature and min-p."""
        self._laws = None
        if self._capture.processed_rows() or self._capture.masked_rows().rows:
            # Once for all, so that tokens are drawn from these very sets.
            logits, k, p = _truncated(logits, k, p), None, None
            self._laws = logits
        return self._draw(logits, generators, k, p)

    def gather(self, logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        """Gather as the sampler does, with processed log-probabilities in the rows that want them."""
        laws, self._laws = self._laws, None
        if laws is not None:
            masked = self._capture.masked_rows()
            if masked.rows:
                several = (_rows_of(each, masked.rows) for each in (laws, logprobs, token_ids))
                self._capture.sets.put(masked, *several)
            if rows := self._capture.processed_rows():
                own = normalised(_rows_of(laws, rows))
                logprobs = logprobs.index_copy(0, torch.tensor(rows, device=laws.device), own)
        return self._gather(logprobs, num_logprobs, token_ids)


class ProcessedLogprobsV2:
    """``ProcessedLogprobsV1`` for runner V2, whose sampler takes log-probabilities from the logits that
    ``sample`` returns if its ``logprobs_mode`` says so."""

    def __init__(self, sampler: Any, capture: CaptureV2) -> None:
        if not hasattr(sampler, "sample") or not hasattr(sampler, "logprobs_mode"):
            raise EngineUnsupported(OTHER_SAMPLER)
        self._capture = capture
        self._sampler, self._sample = sampler, sampler.sample
        sampler.sample = self.sample

    def sample(
        self,
        logits: torch.Tensor,
        expanded: torch.Tensor,
        mapping: torch.Tensor,
        slots: np.ndarray,
        *rest: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sampler's tokens, and logits: processed in rows that want them, else the model's."""
        lengths = rest[-1]  # of the texts
        rows = self._capture.processed_rows(slots)
        masked = self._capture.masked_rows(slots, lengths)
        # With "processed_logprobs" the sampler uses no kernel that hides the processed logits.
        is_seen = len(rows) or masked.rows
        self._sampler.logprobs_mode = "processed_logprobs" if is_seen else "raw_logprobs"
        sampled, processed = self._sample(logits, expanded, mapping, slots, *rest, **named)
        if masked.rows:
            several = (logits, processed, sampled.view(-1))
            own, laws, token_ids = (_rows_of(each, masked.rows) for each in several)
            self._capture.sets.put(masked, laws.float(), own, token_ids)
        if masked.rows and not len(rows):
            return sampled, logits
        if not len(rows) or processed is logits:
            return sampled, processed
        index = torch.from_numpy(rows).to(logits.device)
        return sampled, logits.float().index_copy(0, index, processed[index].float())


def connect_capture(model_runner: Any) -> tuple[RowStore, DrawnSets]:
    """Find the capture that vLLM has installed in a runner, connect it to the sampler, and return its row
    store and the sets of its draws. The sampler then returns processed log-probabilities to requests that
    want them.

    Raises:
        EngineUnsupported: the runner has no capture.
    """
    if hasattr(model_runner, "input_batch") and hasattr(model_runner, "rejection_sampler"):
        VerifyingCaptureV1(model_runner)
    capture, sampler = _find(model_runner), model_runner.sampler
    if isinstance(capture, CaptureV2):
        ProcessedLogprobsV2(sampler, capture)
        return capture.store, capture.sets
    if model_runner.device.type == "cpu":
        drawing = getattr(sampler, "topk_topp_sampler", None)
        if drawing is None or not hasattr(torch.ops._C, "fused_gumbel_argmax"):
            raise EngineUnsupported("this vLLM samples otherwise on a CPU, and would ignore seeds")
        if drawing.use_fp64_gumbel:
            raise EngineUnsupported(
                "on a CPU genrt draws samples itself: leave use_fp64_gumbel out"
            )
        drawing.forward = capture.draw
    ProcessedLogprobsV1(sampler, capture)
    return capture.store, capture.sets


def _find(runner: Any) -> CaptureV1 | CaptureV2:
    try:
        if hasattr(runner, "input_batch"):
            processors = list(runner.input_batch.logitsprocs.all)
        else:
            processors = list(runner.sampler.logits_processors)
    except AttributeError as error:
        raise EngineUnsupported(
            f"this vLLM holds its logits processors elsewhere: {error}"
        ) from error
    for processor in processors:
        if isinstance(processor, CaptureV1 | CaptureV2):
            return processor
    raise EngineUnsupported("this vLLM did not install genrt's logits processor")


class WorkerRows:
    """vLLM's ``worker_extension_cls`` for engines with workers in other processes. vLLM adds its methods
    to the worker; ``RemoteStore`` calls them."""

    model_runner: Any

    def genrt_connect(self) -> None:
        """Connect the capture, as ``connect_capture`` does; the store stays in the worker."""
        runner = self.model_runner
        connect_capture(runner)
        # On a CPU, vLLM allocates a later pipeline stage's input buffers only if it compiles the model.
        if runner.device.type == "cpu" and not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def genrt_take(self, tickets: list[int]) -> tuple[np.ndarray, list[bool]] | None:
        """Return the finite rows ``[n, vocab_size]`` on the host, and for each ticket whether its row is
        finite. Workers with the same rows, or without rows, forget theirs and return ``None``."""
        store = _find(self.model_runner).store
        if get_tensor_model_parallel_rank() != 0 or not len(store):
            store.forget(tickets)
            return None
        rows = store.take(tickets)
        finite = [row for row in rows if row is not None]
        stacked = torch.stack(finite).cpu().numpy() if finite else np.empty((0, 0), np.float32)
        return stacked, [row is not None for row in rows]

    def genrt_forget(self, tickets: list[int]) -> None:
        """Forget rows that will not be taken."""
        _find(self.model_runner).store.forget(tickets)


class RemoteStore:
    """``RowStore``'s ``take`` and ``forget`` for workers in other processes: ``call`` is the engine's
    ``collective_rpc``. Rows travel over the host to ``device``."""

    def __init__(self, call: Callable[..., list[Any]], device: torch.device) -> None:
        self._call, self._device = call, device
        call("genrt_connect")

    def take(self, tickets: Iterable[int]) -> list[torch.Tensor | None]:
        replies = [r for r in self._call("genrt_take", args=([*tickets],)) if r is not None]
        if len(replies) != 1:
            raise EngineUnsupported(
                f"{len(replies)} of vLLM's workers have the rows, not one: this parallel set-up is not "
                "supported"
            )
        stacked, finite = replies[0]
        rows = iter(torch.from_numpy(stacked).to(self._device))
        return [next(rows) if ok else None for ok in finite]

    def forget(self, tickets: Iterable[int]) -> None:
        self._call("genrt_forget", args=(list(tickets),))
