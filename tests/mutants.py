"""The mutation list: ways to break genrt, each of which a test must catch.

They are the hard core: what they break is promised, and each is a mistake of another kind. ``mutate.py``
applies them, one at a time; ``test_mutants.py`` sees that they still apply. A break names a function, a
method or a class, and what happens to its syntax tree: comments, docstrings, layout, and all the rest of
the file may change freely. The tests that are named are few and quick, and vLLM's only where nothing else
can see it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Swap:
    """The expression or statement ``old``, which a symbol holds once, becomes ``new``."""

    old: str
    new: str

    def apply(self, node: Definition) -> int:
        """Break the definition, and return how many times ``old`` was found."""
        swapping = _Swapping(_parsed(self.old), _parsed(self.new))
        swapping.visit(node)
        return swapping.count


@dataclass(frozen=True, slots=True)
class Drop:
    """The call of ``function`` that is a statement of a symbol, whatever its arguments, is left out."""

    function: str

    def apply(self, node: Definition) -> int:
        """Break the definition, and return how many calls were found."""
        dropping = _Dropping(self.function)
        dropping.visit(node)
        return dropping.count


@dataclass(frozen=True, slots=True)
class Instead:
    """The body of a function becomes ``body``."""

    body: str

    def apply(self, node: Definition) -> int:
        """Break the definition, and return 1."""
        node.body = ast.parse(self.body).body
        return 1


Change = Swap | Drop | Instead


@dataclass(frozen=True, slots=True)
class Mutant:
    """A break: its name says what goes wrong, ``symbol`` is ``module:qualified.name``, and ``change`` is
    what happens to it. Of ``tests``, or of what ``only`` selects from them as ``pytest -k``, one fails
    then."""

    name: str
    symbol: str
    change: Change
    tests: tuple[str, ...]
    only: str = ""

    @property
    def file(self) -> str:
        """The symbol's file, from the root of the project."""
        return self.symbol.partition(":")[0].replace(".", "/") + ".py"

    def applied(self, source: str) -> str:
        """Return the source of the file, broken. Raises ValueError unless the symbol is in it once, and
        what changes is in the symbol once."""
        tree = ast.parse(source)
        count = self.change.apply(definition(tree, self.symbol))
        if count != 1:
            raise ValueError(f"{self.symbol}: {self.name}: found {count} times: {self.change}")
        return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def definition(tree: ast.Module, symbol: str) -> Definition:
    """Return the definition of a symbol, which may stand anywhere inside of the one before it. Raises
    ValueError unless there is one."""
    inside: ast.AST = tree
    for name in symbol.partition(":")[2].split("."):
        named = [
            node
            for node in ast.walk(inside)
            if isinstance(node, Definition) and node.name == name and node is not inside
        ]
        if len(named) != 1:
            raise ValueError(f"{symbol}: {name} is defined {len(named)} times")
        [inside] = named
    assert isinstance(inside, Definition)
    return inside


def _parsed(source: str) -> ast.expr | ast.stmt:
    [statement] = ast.parse(source).body
    return statement.value if isinstance(statement, ast.Expr) else statement


class _Swapping(ast.NodeTransformer):
    """Puts ``new`` where ``old`` is."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new, self.count = ast.dump(old), new, 0

    def visit(self, node: ast.AST) -> ast.AST:
        whole = isinstance(self.new, ast.stmt) and isinstance(node, ast.Expr)
        if ast.dump(node.value if whole else node) == self.old:  # type: ignore[attr-defined]
            self.count += 1
            return self.new
        return self.generic_visit(node)


class _Dropping(ast.NodeTransformer):
    """Leaves out the statements that call a function."""

    def __init__(self, function: str) -> None:
        self.function, self.count = function, 0

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and ast.unparse(call.func) == self.function:
            self.count += 1
            return ast.Pass()
        return node


TABLE = r"""
cluster.engine: test_engine_machine.py -k walk
  ReplicaEngine._lost: a question that kills replicas is asked without end
    request in self._moved -> False
  ReplicaEngine._prepared: a replica with old settings is asked
    replica.settings == self._settings -> True
runtime.batcher: test_new_weights.py test_run_simulated.py -k version or weights or update
  Batcher.join: questions run by half of the new weights
    self.holds and requests -> False
  Batcher._is_passed_unseen: weights are replaced under what was asked before
    instead return self._is_watched
  Batcher.take_down: a stream goes on by other weights than it began with
    self._in_line() -> ()
runtime.weights: test_new_weights.py
  Update.finish: rows of the old weights stay cached
    without self._cache.clear
  Update.end: half of the new weights answer when an update is given up
    self._engine is answering -> False
  Update.begin: adapters are loaded while half of the weights are new
    without self._thread.run_exclusively
engines.weights: test_new_weights.py
  KeptWeights.reload: an engine after another has the weights of the checkpoint
    instead return
runtime.batcher: test_batcher.py
  Batcher._drop: a cancelled waiter takes its request from the others
    entry is None or entry.waiters.pop(waiter, None) is None or entry.waiters
    -> entry is None or entry.waiters.pop(waiter, None) is None
  Batcher._drop: what was cancelled in the queue is sent all the same
    self._ready.pop(entry, 0) -> 0
  Batcher.leave: the engine is not told of a withdrawn request
    without self._wake
  Batcher._register: a request that was withdrawn stays so when it is asked again
    without self._withdrawn.pop
runtime.batcher: test_queue.py test_recovery.py
  Batcher._requeue: what ran out of memory goes behind what came later
    reversed(again) -> again
  Batcher._must_wait: newcomers overtake those who wait for room
    not self._line -> True
runtime.batcher: test_engine_thread.py
  Batcher.close: who closes in the middle of a question goes on in it
    self.lock._is_owned() -> False
engines.completions: test_completions.py
  CompletionState._stop: a stop string over two tokens is missed
    max(0, seen - len(stop) + 1) -> seen
structures.guides: test_completion_laws.py test_structures.py
  Guide.words: an incomplete text may end
    self._matcher.is_accepting() -> True
runtime.batcher: test_simulation.py -k fixed_seeds
  deliver: a loop that was closed keeps the others' answers from them
    RuntimeError -> LookupError
runtime.cache: test_cache.py
  RowCache.forget: with an adapter go all that have its name
    request.adapter == adapter -> request.adapter and request.adapter.name == adapter.name
runtime.answers: test_population_answers.py
  _FoundRows.are_whole: a population waits for a row as often as it is in it
    len(self.distinct) -> len(self.wanted)
runtime.answers: test_answers.py test_draw.py
  AnsweringEngine._without: the last who reads from a row takes it from who asked for it
    row.is_asked -> False
runtime.thread: test_engine_thread.py test_recovery.py
  EngineThread._may_restart: an engine that dies of every question is opened for ever
    self._answered != before -> True
  EngineThread._open: after a restart the adapters are gone
    without answering.reload_adapters
  EngineThread._end: calls that came too late are never answered
    without future.set_exception
  EngineThread.batcher: a forked child uses the thread of its parent
    instead return self._batcher
runtime.adapters: test_lm.py
  AdapterNames._retire: weights that were loaded over stay in the engine
    without self._thread.batcher.retire
questions.draws: test_answers.py test_draw.py
  DrawToken.answer: the draws of a step share their randomness
    [deciding_seed(each) for each in wanted] -> [deciding_seed(wanted[0]) for each in wanted]
questions.arguments: test_engine.py
  Adapter: the version of an adapter's weights is no part of the key
    version: int -> version: int = __import__('dataclasses').field(compare=False)
questions.scores: test_arguments.py test_draw.py
  ScoreRequest.rows: a score sees the token that it scores
    range(TOKEN_BYTES * self.start, most, TOKEN_BYTES)
    -> range(TOKEN_BYTES * (self.start + 1), most + 1, TOKEN_BYTES)
tokens.sampling: test_sampling.py test_numbers.py
  mixed: every token of a seeded sample has the same randomness
    step + 1 -> 1
  _inverse: a token of probability 0 is drawn by a uniform of 0
    sums > sums.amax(dim=-1, keepdim=True) * uniforms
    -> sums >= sums.amax(dim=-1, keepdim=True) * uniforms
  _random_numbers: a row's draw depends on the generators of others
    torch.cat([_rand(1, generator) for generator in generators]) -> _rand(count, generators[0])
inference.resampling: test_resampling.py
  _inverse_cdf: a weight of 0 has children
    'right' -> 'left'
inference.smc: test_inference.py test_algorithms.py
  SMC._resampled: resampling forgets the evidence so far
    np.full(count, state.log_evidence) -> np.zeros(count)
  SMC.step: resampling leaves the particles where they are
    [state.particles[ancestor] for ancestor in ancestors.tolist()] -> particles
inference.text_model: test_blocks.py -k not vllm and (weight or twist or rejection or question)
  TextModel._block_weights: what a token was drawn with is left out of its weight
    block.logprob -> 0.0
inference.text_model: test_stops.py
  TextModel._draw: a weight grows by the token's probability, not by the mass of what may follow
    found.log_mass -> found.logprobs
inference.awrs: test_awrs.py
  draw_allowed: one accepted token is enough
    len(accepted) < 2 -> len(accepted) < 1
inference.programs: test_programs.py
  Program._grown: all children go on with the execution of their parent
    particle.live.pop() -> particle.live[0]
constraints.grammars: test_constraints.py test_walks.py
  _Vocabulary.fill: a text may end where it is not complete
    state.accepting -> True
engines.residency: test_residency_machine.py
  Residents.is_parent: a guess may be another adapter's sequence
    of == adapter -> True
engines.vllm.capture: test_capture.py
  CaptureV1.apply: rows are matched by the order in which requests came
    [tickets[index] for index in indices] -> list(tickets.values())
  CaptureV2.apply: a slot's number is taken for its place in the step
    np.flatnonzero(tickets >= 0) -> slots[tickets >= 0]
  RowStore.take: rows that are not finite are answers
    position in not_finite[id(rows)] -> False
  RowStore.put: of a prompt's parts the first one's row stays
    self._rows[ticket] = (rows, position) -> self._rows.setdefault(ticket, (rows, position))
engines.vllm.scores: test_vllm_scores.py -k long_prefix
  limit_hits: a prefix in the cache hides the first wanted position
    _Shortened(request, first + 1) -> _Shortened(request, first + 2)
engines.vllm.steps: test_sequences.py -k population or between_two_steps or cancelled_extension
  DecodeSteps._tokens_of: a prepared step is run although its sequences have moved on
    tokens.positions != step.positions -> False
engines.vllm.seats: test_sequences.py -k 30-4-4 or population
  Seats.take: a fork overwrites a block that others have
    self._pool.is_block_writable(before[full]) -> True
engines.vllm.scheduler: test_sequences.py -k 30-4-4 or population
  OpenScheduler._evict: an evicted sequence is thought to be resident
    without self._evicted.append
engines.vllm.seats: test_seats.py
  Seats._take_tokens: a request has another's tokens and its own hashes
    donor.block_hashes[hashed : length // self._hashed] -> []
  _independent: a block is copied while it is written
    source in written -> False
generation.journal: test_jobs.py -k kill_at_any_byte
  Journal.start: a partial line of a killed job stays
    without os.ftruncate
generation.jobs: test_jobs.py -k changed or cancellation
  JobRun._run_rows: what ended with an interrupt is lost
    answers.drain() -> ()
"""
"""Breaks, by the module and the test files that catch them: a symbol with what goes wrong, then how."""

_HOW = re.compile(r"    (?:without (?P<drop>.*)|instead (?P<body>.*)|(?P<old>.*?) -> (?P<new>.*))")


def read(table: str) -> Iterator[Mutant]:
    """Yield the mutants of a table. A line that begins with an arrow goes on with the line before."""
    found = {path.name: path.relative_to(ROOT).as_posix() for path in TESTS.rglob("test_*.py")}
    lines = iter(table.strip("\n").replace("\n    -> ", " -> ").split("\n"))
    for line in lines:
        if not line.startswith(" "):
            module, _, tests = line.partition(": ")
            tests, _, only = tests.partition(" -k ")
            paths = tuple(found[name] for name in tests.split())
            continue
        symbol, _, name = line.strip().partition(": ")
        how = _HOW.fullmatch(next(lines))
        assert how is not None, line
        change: Change = Drop(how["drop"]) if how["drop"] else Instead(how["body"])
        if how["old"]:
            change = Swap(how["old"], how["new"])
        yield Mutant(name, f"genrt.{module}:{symbol}", change, paths, only)


MUTANTS = tuple(read(TABLE))
