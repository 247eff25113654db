"""The mutation list: ways to break genrt, each of which a test must catch.

Each is a mistake that somebody could make, and another kind of mistake than the rest. ``mutate.py``
applies them, one at a time; ``test_mutants.py`` sees that they still apply. Where the source that one
breaks has changed, break the new source the same way; the tests that are named are few and quick, and
vLLM's only where nothing else can see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent


@dataclass(frozen=True, slots=True)
class Mutant:
    """A break: its name says what goes wrong; ``old``, which occurs once in ``file``, becomes ``new``;
    one of ``tests``, or of those in them that ``only`` selects as ``pytest -k``, fails then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    only: str = ""

    def applied(self, source: str) -> str:
        """The source, broken. Raises ValueError unless ``old`` is in it exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file}: {self.name}: found {count} times: {self.old!r}")
        return source.replace(self.old, self.new)


def breaks(
    file: str, tests: str, *mutants: tuple[str, str, str], only: str = ""
) -> tuple[Mutant, ...]:
    """Breaks of one file of the package that are caught by the same test files, named with spaces
    between: name, old text, new text of each."""
    found = {path.name: path.relative_to(ROOT).as_posix() for path in TESTS.rglob("test_*.py")}
    paths = tuple(found[name] for name in tests.split())
    return tuple(Mutant(name, f"genrt/{file}", old, new, paths, only) for name, old, new in mutants)


OF_THE_RUNTIME: tuple[Mutant, ...] = (
    *breaks(
        "runtime/gathering.py",
        "test_batcher.py",
        (
            "a loop that never goes quiet is waited for without end",
            "if gathering.questions != seen and gathering.passes < PATIENCE:",
            "if gathering.questions != seen:",
        ),
        (
            "a loop's third pass is not waited for",
            "if gathering.questions != seen and gathering.passes < PATIENCE:",
            "if gathering.questions != seen and gathering.passes < 2:",
        ),
        (
            "a gathering that began after a restart is ended by the one before",
            "if self._by_loop.get(loop) is gathering:",
            "if loop in self._by_loop:",
        ),
        (
            "a loop of cached questions never lets its event loop run",
            "            await asyncio.sleep(0)\n",
            "",
        ),
    ),
    *breaks(
        "runtime/batcher.py",
        "test_batcher.py",
        (
            "a cancelled waiter takes its request from the others",
            "entry.waiters.pop(waiter, self) is self or entry.waiters:",
            "entry.waiters.pop(waiter, self) is self:",
        ),
        (
            "a request that was withdrawn stays so when it is asked again",
            "            self._flight.rescue(entry)\n",
            "",
        ),
        (
            "what was cancelled in the queue is sent all the same",
            "                self._end(entry)\n                self._ready.discard(entry)\n",
            "                self._end(entry)\n",
        ),
        (
            "who gets an error is counted as one who left",
            "                        self._drop(waiter)\n",
            "",
        ),
        (
            "waiters of one failed request share an exception object",
            "failed.append((waiter, error.fresh()))",
            "failed.append((waiter, error))",
        ),
        (
            "rows of a removed adapter stay in the cache",
            "            self._cache.forget(adapter)\n",
            "",
        ),
        (
            "what a closed loop left behind is sent",
            "            self._cancel(waiter)\n        return [waiters,",
            "            pass\n        return [waiters,",
        ),
        (
            "the end of a closed loop's tasks is under the lock",
            "            gone = self._sweep()\n",
            "            self._sweep()\n            gone = None\n",
        ),
        (
            "who closes in the middle of a question goes on in it",
            "        if self._lock._is_owned():  # type: ignore[attr-defined]\n",
            "        if False:\n",
        ),
        (
            "a loop of refused questions never lets its event loop run",
            "            await self._at_once.go_round()\n            raise\n",
            "            raise\n",
        ),
        (
            "what needs no forward ends the turn",
            "            self._settle(self._sent(engine, flush))\n        if self._flight:",
            "            return self._settle(self._sent(engine, flush))\n        if self._flight:",
        ),
        (
            "the engine is not told of a withdrawn request",
            "        self._wake()  # to forget",
            "        pass  # to forget",
        ),
        (
            "the rest of a failed step is not withdrawn from the engine",
            "            engine.cancel(lost)\n",
            "",
        ),
        (
            "an equal question does not join one in flight",
            "            if entry is None:\n                entries[request] =",
            "            if entry is None or entry.in_flight:\n                entries[request] =",
        ),
    ),
    *breaks(
        "runtime/batcher.py",
        "test_admission.py test_recovery.py",
        (
            "who waits for room is not told of the close",
            "waiters = waiting | {w: None",
            "waiters = {w: None",
        ),
        (
            "what ran out of memory goes behind what came later",
            "self._ready.put_back(again)",
            "self._ready.add(again)",
        ),
        (
            "what was cancelled is sent again for want of memory",
            "            if entry in withdrawn:\n",
            "            if False:\n",
        ),
        (
            "a question of a thread stays when its time is out",
            'raise timed_out(cast("float", timeout)) from None\n'
            "        finally:\n            if waiter.missing:\n                self._leave(waiter)\n",
            'raise timed_out(cast("float", timeout)) from None\n',
        ),
    ),
    *breaks(
        "runtime/bindings.py",
        "test_batcher.py",
        (
            "an adapter is removed while requests are bound to it",
            "return [adapter for adapter in self._retired if adapter not in self._bound]",
            "return list(self._retired)",
        ),
    ),
    *breaks(
        "runtime/admission.py",
        "test_batcher.py",
        (
            "a flush may be larger than it may",
            "count = min(self._most, room, len(self._entries))",
            "count = min(room, len(self._entries))",
        ),
        (
            "the newest requests go first",
            "self._entries.popitem(last=False)[0]",
            "self._entries.popitem(last=True)[0]",
        ),
        (
            "every newcomer puts the flush off",
            "        if not self._entries:\n            self._due =",
            "        if True:\n            self._due =",
        ),
    ),
    *breaks(
        "runtime/flight.py",
        "test_admission.py test_recovery.py",
        (
            "after running out of memory flushes stay small for good",
            "self._size = min(2 * self._size, sys.maxsize)",
            "self._size = self._size",
        ),
    ),
    *breaks(
        "runtime/admission.py",
        "test_admission.py test_recovery.py",
        (
            "the bytes of what left the queue are counted for ever",
            "        self._bytes -= sum(map(_NBYTES, requests))\n",
            "",
        ),
        (
            "a question larger than the queue waits for ever",
            "return not self._queued or (",
            "return (",
        ),
        (
            "newcomers overtake those who wait for room",
            "return bool(self._clients) or not self._fits(",
            "return not self._fits(",
        ),
        (
            "one client's questions all enter before the next one's",
            "        self._waiting.move_to_end(self._clients[waiter])\n",
            "",
        ),
        (
            "a client none of whose questions waits any more blocks the others",
            "        if not waiters:\n            self._waiting.pop(client, None)\n",
            "",
        ),
    ),
    *breaks(
        "runtime/waiters.py",
        "test_batcher.py test_draw.py",
        (
            "an interrupted loop forgets whom it had to tell",
            "        if loop is not None and done:\n",
            "        if loop is not None and len(done) > TOLD_AT_ONCE:\n",
        ),
        (
            "a loop does not go round while it tells many",
            "min(len(done), TOLD_AT_ONCE)",
            "len(done)",
        ),
        (
            "whether a future is done already is not looked at",
            "            with _DONE:  #",
            "            with contextlib.nullcontext():  #",
        ),
        (
            "waiters get views of the step's rows",
            "copies = iter(apart([result for result in apiece if isinstance(result, Tensor)]))",
            "copies = iter([result for result in apiece if isinstance(result, Tensor)])",
        ),
        (
            "a question that asks twice gets one answer",
            "if len(found) == len(self.requests):",
            "if found:",
        ),
        (
            "a loop that was closed keeps the others' answers from them",
            "with contextlib.suppress(RuntimeError):",
            "with contextlib.suppress(LookupError):",
        ),
        (
            "one waiter's copy for which there is no memory fails all",
            "        if len(waiters) == 1:\n            return [failure(error)]\n",
            "        return [failure(error) for _ in waiters]\n",
        ),
        (
            "who asked for the same likeliest tokens share their tensors",
            "return TopLogprobs(*apart(result)) if isinstance(result, TopLogprobs) else result",
            "return result",
        ),
    ),
    *breaks(
        "runtime/cache.py",
        "test_cache.py",
        (
            "the cache keeps the step's row itself, a view",
            "copies = apart(list(kept.values()))",
            "copies = list(kept.values())",
        ),
        (
            "the row that has been there longest goes, used or not",
            "from cachetools import LRUCache",
            "from cachetools import FIFOCache as LRUCache",
        ),
        (
            "with an adapter go all that have its name",
            "            if request.adapter == adapter:",
            "            if request.adapter and request.adapter.name == adapter.name:",
        ),
        (
            "a row is kept by its context, whatever adapter it is of",
            "self._rows[request] = copy",
            "self._rows[LogprobsRequest(packed=request.packed)] = copy",
        ),
        (
            "a row larger than the whole cache keeps those before it out",
            "for each, row in rows.items() if row.nbytes <= self._max_bytes]",
            "for each, row in rows.items()]",
        ),
        (
            "of more rows than there is room for the first ones stay",
            "return dict(fitting[first:]), [request for request, _ in fitting[:first]]",
            "last = len(fitting) - first\n"
            "        return dict(fitting[:last]), [request for request, _ in fitting[last:]]",
        ),
        (
            "evictions are not counted",
            "                self._evictions += before - len(self._rows)\n",
            "",
        ),
    ),
    *breaks(
        "tokens/rows.py",
        "test_rows.py",
        (
            "rows of one step are taken in the order they lie in memory",
            "if gap > 0 and offsets == list(",
            "if gap > 0 and sorted(offsets) == list(",
        ),
        (
            "a caller's stack is a view of the step",
            "return whole.clone(memory_format=torch.contiguous_format)",
            "return whole",
        ),
        (
            "rows of several storages are taken for one table",
            "return offsets if len(origins) == 1 else None",
            "return offsets",
        ),
    ),
    *breaks(
        "engines/protocol.py",
        "test_engine.py",
        (
            "a CPU that ran out of memory is not understood",
            " or NO_CPU_MEMORY in str(error):",
            ":",
        ),
        (
            "an accelerator in an error state is asked again",
            "        kind = EngineDied\n",
            "        kind = EngineFailed\n",
        ),
    ),
    *breaks(
        "questions/values.py",
        "test_engine.py",
        (
            "the version of an adapter's weights is no part of the key",
            "    version: int\n",
            "    version: int = field(compare=False)\n",
        ),
        (
            "draws under different masks are one",
            "            and self.mask == other.mask\n",
            "",
        ),
        (
            "samples with different stop tokens are one",
            "stop_token_ids: frozenset[int] = frozenset()",
            "stop_token_ids: frozenset[int] = field(default=frozenset(), compare=False)",
        ),
        (
            "messages hold whole prompts",
            "if len(token_ids) <= 4:",
            "if len(token_ids) <= 4096:",
        ),
    ),
    *breaks(
        "runtime/answers.py",
        "test_answers.py test_draw.py",
        (
            "what an engine could not forget is sent to it again",
            "        return {each: error for each, error in self._unforgotten.items() if each in new}",
            "        return {}",
        ),
        (
            "an engine that could not forget is not told again",
            "            self._cancel([])\n",
            "            pass\n",
        ),
        (
            "the last who reads from a row takes it from who asked for it",
            "                        if request.row not in self._asked:\n"
            "                            unwanted.append(request.row)\n",
            "                        unwanted.append(request.row)\n",
        ),
        (
            "of equally likely tokens the higher ids come first",
            "torch.arange(2**32 - 1, 2**32 - 1 - rows.shape[-1], -1, device=rows.device)\n",
            "2**32 - 1 - torch.arange(rows.shape[-1], device=rows.device).flip(0)\n",
        ),
        (
            "a temperature is left out where there are no others",
            "case DrawToken(temperature=1.0):",
            "case DrawToken():",
        ),
        (
            "the draws of a step share their randomness",
            "[seed_of(each) for each in asked]",
            "[seed_of(asked[0]) for each in asked]",
        ),
        (
            "beside masked draws those without a mask may draw nothing",
            'everything = b"\\xff" * size',
            'everything = b"\\x00" * size',
        ),
        (
            "rows that were moved to the host are not cached",
            "                self._cache.put(read.request.row, read.row)\n",
            "                pass\n",
        ),
        (
            "reads of a failed step are still thought to be in progress",
            "            self._forget()\n            raise\n",
            "            raise\n",
        ),
        (
            "a row that somebody reads from is computed again for who asks for it",
            "if request not in self._readers or request in self._asked:",
            "if request not in self._asked:",
        ),
    ),
    *breaks(
        "lm.py",
        "test_lm.py",
        (
            "a batch of samples has one seed for all",
            "seed=(request.seed + number) % 2**63)",
            "seed=request.seed % 2**63)",
        ),
        (
            "weights that were loaded over stay in the engine",
            "                self._batcher.retire(previous)\n",
            "                pass\n",
        ),
        (
            "samples without a seed share one draw",
            "token_ids, self._bound(adapter), next(self._nonces), **options",
            "token_ids, self._bound(adapter), 0, **options",
        ),
        (
            "an adapter is bound before it is loaded",
            "            engine.add_adapter(adapter, directory)\n"
            "            with self._adapters_lock:\n"
            "                previous = self._adapters.get(name)\n"
            "                self._adapters[name] = adapter\n",
            "            with self._adapters_lock:\n"
            "                previous = self._adapters.get(name)\n"
            "                self._adapters[name] = adapter\n"
            "            engine.add_adapter(adapter, directory)\n",
        ),
    ),
    *breaks(
        "numbers.py",
        "test_numbers.py",
        (
            "True is the number 1",
            "if number is None or is_truth_value(value):",
            "if number is None:",
        ),
        (
            "an int beyond every float is a finite one",
            "number = math.inf",
            "number = 0.0",
        ),
    ),
    *breaks(
        "inference/checks.py",
        "test_programs.py test_text_model.py",
        (
            "a truth value is a log-weight",
            '    if is_truth_value(value):\n        raise InvalidRequest("give a log-weight, for',
            '    if False:\n        raise InvalidRequest("give a log-weight, for',
        ),
        only="refused",
    ),
    *breaks(
        "inference/ends.py",
        "test_stops.py",
        (
            "a string is looked for in the last token alone",
            "max(0, len(data) - new - len(string) + 1)",
            "max(0, len(data) - new)",
        ),
        (
            "a text ends before the last of the strings that it has come to",
            "return min(places, default=None)",
            "return max(places, default=None)",
        ),
    ),
    *breaks(
        "inference/infilling.py",
        "test_infilling.py",
        (
            "the mass of what may follow stays in the weight",
            "            p.observe(-going)\n",
            "",
        ),
        (
            "a gap that has ended keeps its twist",
            "p.observe(total - twist)",
            "p.observe(total)",
        ),
        (
            "gaps that the constraint does not let end here do",
            "weights = [ending if may_end else -math.inf, going]",
            "weights = [ending, going]",
        ),
    ),
    *breaks(
        "inference/unawaited.py",
        "test_programs.py",
        (
            "what was never awaited is forgotten",
            "self._asked = [each for each in self._asked if each.is_open]",
            "self._asked = []",
        ),
        (
            "what is not awaited in a returned dictionary is not seen",
            "values += [*each, *each.values()] if isinstance(each, dict) else each",
            "values += each",
        ),
    ),
    *breaks(
        "questions/token_ids.py",
        "test_arguments.py",
        (
            "the first token id past the vocabulary passes",
            ".argmax()] >= vocab_size:",
            ".argmax()] > vocab_size:",
        ),
    ),
    *breaks(
        "questions/masks.py",
        "test_draw.py test_masks.py",
        (
            "bits beyond the vocabulary make another mask",
            "            if last >> beyond:\n",
            "            if False:\n",
        ),
        (
            "flags for each token are read as token ids",
            "    if _are_flags(words, vocab_size):\n",
            "    if False:\n",
        ),
        (
            "all token ids in another order are taken for flags",
            "return max(words) <= 1 and len(set(words)) < count",
            "return len(set(words)) <= count",
        ),
        (
            "bytes of a foreign order are packed as they are",
            "np.dtype(np.int32).newbyteorder()",
            "np.dtype(np.int32)",
        ),
    ),
    *breaks(
        "questions/checks.py",
        "test_arguments.py test_lm.py test_draw.py",
        (
            "the longest context is refused",
            "if len(ids) > self.max_model_len:",
            "if len(ids) >= self.max_model_len:",
        ),
        (
            "greedy samples are drawn for each who asks",
            "decided = temperature == 0.0 or seed is not None",
            "decided = seed is not None",
        ),
        (
            "a score sees the token that it scores",
            "packed=whole[: start + TOKEN_BYTES * count]",
            "packed=whole[: start + TOKEN_BYTES * (count + 1)]",
        ),
        (
            "a batch of draws has one seed for all",
            "own_seed = (seed + place) % (_LAST_SEED + 1)",
            "own_seed = seed",
        ),
    ),
    *breaks(
        "runtime/engine_loop.py",
        "test_engine_thread.py test_recovery.py",
        (
            "a call that was cancelled ends the thread",
            "            if future.set_running_or_notify_cancel():\n"
            "                try:\n                    result",
            "            if True:\n                try:\n                    result",
        ),
        (
            "an engine that dies of every question is opened for ever",
            "not self._is_over and self._answered != before",
            "not self._is_over",
        ),
        (
            "after a restart the adapters are gone",
            "            self._batcher.fail(answering.reload_adapters())\n",
            "            pass\n",
        ),
        (
            "the engine is left open",
            "        self._end(reason)\n        answering.close()\n",
            "        self._end(reason)\n",
        ),
        (
            "calls that came too late are never answered",
            "                future.set_exception(reason.fresh())\n",
            "                pass\n",
        ),
    ),
    *breaks(
        "runtime/thread.py",
        "test_engine_thread.py test_recovery.py",
        (
            "a forked child uses the thread of its parent",
            "        if os.getpid() != self._process:\n            raise Closed(",
            "        if self._process < 0:\n            raise Closed(",
        ),
        (
            "the engine thread waits for itself to close",
            "            return  # to the turn in progress, after which it tells everyone and ends\n",
            "            pass\n",
        ),
    ),
)
