"""The mutation list: ways to break genrt, each of which a test must catch.

They are the hard core: what they break is promised, and each is a mistake of another kind. ``mutate.py``
applies them, one at a time; ``test_mutants.py`` sees that they still apply. A break names a function, a
method or a class, and what happens to its syntax tree: comments, docstrings, layout, and all the rest of
the file may change freely. The tests that are named are few and quick, and vLLM's only where nothing else
can see it.
"""

from __future__ import annotations

import ast
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


def breaks(
    module: str, tests: str, *mutants: tuple[str, str, Change], only: str = ""
) -> tuple[Mutant, ...]:
    """Breaks of one module of genrt that are caught by the same test files, named with spaces between:
    symbol, what goes wrong, and how, of each."""
    found = {path.name: path.relative_to(ROOT).as_posix() for path in TESTS.rglob("test_*.py")}
    paths = tuple(found[name] for name in tests.split())
    return tuple(
        Mutant(name, f"genrt.{module}:{symbol}", change, paths, only)
        for symbol, name, change in mutants
    )


MUTANTS: tuple[Mutant, ...] = (
    *breaks(
        "populations.population",
        "test_populations.py",
        (
            "Population.extend",
            "sequences are extended by what another one gets",
            Swap(
                "[id_words(each, most, allow_empty=True) for each in given]",
                "[id_words(each, most, allow_empty=True) for each in given[::-1]]",
            ),
        ),
        only="extending",
    ),
    *breaks(
        "populations.drawing",
        "test_fleet_machine.py",
        (
            "Drawing._question",
            "a population that was cut is asked anywhere",
            Swap("origins.asked or whole.asked", "origins.asked"),
        ),
        only="walk",
    ),
    *breaks(
        "cluster.health",
        "test_health.py",
        (
            "Health.probed",
            "a replica that answers no probe is asked for ever",
            Swap("self._silent >= self._limits.most_silent", "False"),
        ),
        (
            "Health._recover",
            "an answered probe ends a streak of failures",
            Swap("not self._failures", "True"),
        ),
        (
            "Health.renewed",
            "a stale replica is healthy",
            Swap("settings == current", "True"),
        ),
        (
            "Health.tick",
            "a step may take for ever",
            Swap("busy and now - self._worked > limits.stall_seconds", "False"),
        ),
        (
            "Health.restart",
            "a replica is restarted without end",
            Swap("self._budget < 1.0", "False"),
        ),
        (
            "Health.failed",
            "a replica that fails at everything is asked for ever",
            Swap("self._failures >= self._limits.most_failures", "False"),
        ),
        (
            "Health.opened",
            "a replica serves before it has weights and adapters",
            Swap("self.state = State.STALE", "self.state = State.HEALTHY"),
        ),
        (
            "Health.tick",
            "a replica may take for ever to open",
            Swap("self.lives and now - self._since > limits.open_seconds", "False"),
        ),
    ),
    *breaks(
        "cluster.routing",
        "test_routing.py",
        (
            "Router._home",
            "populations do not stay where they are",
            Instead("return -1"),
        ),
        (
            "Router._is_full",
            "populations of one prompt are not spread",
            Instead("return False"),
        ),
        (
            "Router._is_beyond",
            "what begins alike floods a replica",
            Instead("return False"),
        ),
        (
            "Router._chosen",
            "a population that is new goes where work is least, whoever keeps how many",
            Swap("self._crowd if is_new else self._work", "self._work"),
        ),
        (
            "Router._chosen",
            "a population leaves a busy replica as a text does",
            Swap("POPULATION_MARGIN * max(work, MARGIN)", "MARGIN"),
        ),
        (
            "Router.use",
            "replicas that may not be asked are compared",
            Drop("self._work.compare"),
        ),
        (
            "Router.left",
            "populations that are gone take room",
            Drop("self._add"),
        ),
        (
            "Router.lost",
            "the work of a dead replica is the next one's",
            Drop("self._work.put"),
        ),
    ),
    *breaks(
        "cluster.loads",
        "test_loads.py",
        (
            "Loads.least",
            "the least load is one that nobody has any more",
            Swap("not self._buckets[self._heap[0]]", "False"),
        ),
    ),
    *breaks(
        "cluster.fleet",
        "test_fleet_machine.py",
        (
            "Fleet.died",
            "the questions of a dead replica are lost",
            Swap("self._moves.get(request, 0) < MOST_MOVES", "self._moves.get(request, 0) > 99"),
        ),
        (
            "Fleet.change",
            "replicas with old settings are asked",
            Drop("each.health.outdated"),
        ),
        only="walk",
    ),
    *breaks(
        "cluster.fleet",
        "test_fleet.py",
        (
            "Fleet._has_usable",
            "suspect replicas are asked beside healthy ones",
            Swap(
                "healthy or [each.number for each in self.serving]",
                "[each.number for each in self.serving]",
            ),
        ),
        (
            "Fleet.ended",
            "a question at which an engine fails ends there",
            Swap("bool(failed) and not self._is_alone(replica)", "False"),
        ),
        (
            "Fleet.ended",
            "what another life of a replica tells counts",
            Swap("life != replica.life or not replica.health.lives", "False"),
        ),
        (
            "Fleet.cancel",
            "what is withdrawn is still a replica's work",
            Drop("self._take_off"),
        ),
        (
            "Fleet.change",
            "a replica that lags behind is not told of what is newer",
            Swap("self._is_changed = True", "pass"),
        ),
    ),
    *breaks(
        "cluster.joining",
        "test_joining.py",
        (
            "ReplicaStreams.take",
            "what a stream was told is told again by another replica",
            Drop("streamed.asked.tell"),
        ),
        (
            "ReplicaStreams.begun",
            "what was not read yet is told twice after a death",
            Drop("self._came[each].clear"),
        ),
        (
            "ReplicaStreams.end",
            "what was not read yet is lost at the end",
            Swap("(*told, *rest)", "rest"),
        ),
    ),
    *breaks(
        "cluster.engine",
        "test_fleet_machine.py",
        (
            "ReplicaEngine._on_answers",
            "an answer to what was withdrawn ends the engine",
            Swap("ticket in self._asked", "True"),
        ),
        only="walk",
    ),
    *breaks(
        "cluster.actors",
        "test_actors.py",
        (
            "ActorLink.take",
            "messages are taken as calls come",
            Swap("self._early.pop(self._next)", "self._early.popitem()[1]"),
        ),
        only="in_their_order",
    ),
    *breaks(
        "cluster.connection",
        "test_actors.py",
        (
            "_own_environment",
            "what Ray sets in the environment stays",
            Drop("os.environ.update"),
        ),
        (
            "_on_loopback",
            "a local Ray listens on the host's address",
            Swap("constants.ENABLE_RAY_CLUSTER = False", "pass"),
        ),
        (
            "Connection.leave",
            "the first runtime that closes ends the others' Ray",
            Swap("not self._users and self._is_ours", "self._is_ours"),
        ),
        only="begun or began or environment",
    ),
    *breaks(
        "cluster.programs",
        "test_shipped_programs.py",
        (
            "run_program",
            "a program's seed is not that of what it asks",
            Swap("lm._of_seed(seed)", "lm"),
        ),
        only="without_seeds",
    ),
    *breaks(
        "cluster.programs",
        "test_shipped_programs.py",
        (
            "packed_outcome",
            "an error that cannot be read again is sent back",
            Drop("unpacked"),
        ),
        only="cannot_travel",
    ),
    *breaks(
        "cluster.running",
        "test_shipped_programs.py",
        (
            "Programs.withdraw",
            "a program that is withdrawn goes on",
            Drop("running.cancel"),
        ),
        (
            "Programs._runtime_for",
            "a runtime that a program has closed is the next one's",
            Swap("self._thread is None or not self._thread.alive", "self._thread is None"),
        ),
        only="withdrawn_is or may_close",
    ),
    *breaks(
        "cluster.messages",
        "test_messages.py",
        (
            "_known",
            "a population's question is another one at each message",
            Swap("number not in asked", "True"),
        ),
        (
            "AskedNumbers._forget",
            "replicas keep sequences that nobody goes on from",
            Swap("self.gone.append(self._numbers.pop(asked))", "self._numbers.pop(asked)"),
        ),
    ),
    *breaks(
        "cluster.frames",
        "test_frames.py",
        (
            "Frames.add",
            "a frame that has come in part is taken for whole",
            Swap("end > len(self._data)", "False"),
        ),
    ),
    *breaks(
        "cluster.memory",
        "test_frames.py",
        (
            "Memory._taken",
            "arrays are written over others that somebody reads",
            Swap("piece.memory[: len(free)] == free", "True"),
        ),
        (
            "_leave",
            "memory that nobody reads is never used again",
            Swap("os.getpid() == process", "False"),
        ),
    ),
    *breaks(
        "runtime.batcher",
        "test_new_weights.py test_simulating.py",
        (
            "Batcher.join",
            "questions run by half of the new weights",
            Swap("self.holds and requests", "False"),
        ),
        (
            "Batcher._is_passed_unseen",
            "weights are replaced under what was asked before",
            Instead("return self._is_watched"),
        ),
        (
            "Batcher.take_down",
            "a stream goes on by other weights than it began with",
            Swap("self._in_line()", "()"),
        ),
        only="version or weights or update",
    ),
    *breaks(
        "runtime.weights",
        "test_new_weights.py",
        ("Update.finish", "rows of the old weights stay cached", Drop("self._cache.clear")),
        (
            "Update.end",
            "half of the new weights answer when an update is given up",
            Swap("self._engine is answering", "False"),
        ),
        (
            "Update.begin",
            "adapters are loaded while half of the weights are new",
            Drop("self._thread.run_exclusively"),
        ),
    ),
    *breaks(
        "engines.weights",
        "test_new_weights.py",
        (
            "KeptWeights.reload",
            "an engine after another has the weights of the checkpoint",
            Instead("return"),
        ),
    ),
    *breaks(
        "questions.rows",
        "test_new_weights.py",
        (
            "LogprobsRequest.of_weights",
            "questions to new weights are equal to those to the old",
            Swap("version", "0"),
        ),
        only="key",
    ),
    *breaks(
        "engines.vllm.engine",
        "test_vllm_weights.py",
        (
            "VLLMEngine.forget_residents",
            "sequences of the old weights stay resident",
            Drop("self._abort"),
        ),
    ),
    *breaks(
        "runtime.batcher",
        "test_batcher.py",
        (
            "Batcher._look_for_more",
            "a loop's third pass is not waited for",
            Swap("MAX_PASSES", "2"),
        ),
    ),
    *breaks(
        "runtime.ask",
        "test_batcher.py",
        (
            "Unawaited.let_others_run",
            "a loop of cached questions never lets its event loop run",
            Drop("asyncio.sleep"),
        ),
    ),
    *breaks(
        "runtime.batcher",
        "test_batcher.py",
        (
            "Batcher._drop",
            "a cancelled waiter takes its request from the others",
            Swap(
                "entry is None or entry.waiters.pop(waiter, None) is None or entry.waiters",
                "entry is None or entry.waiters.pop(waiter, None) is None",
            ),
        ),
        (
            "Batcher._drop",
            "what was cancelled in the queue is sent all the same",
            Swap("self._ready.pop(entry, 0)", "0"),
        ),
        (
            "Batcher._settle",
            "waiters of one failed request share an exception object",
            Swap("error.fresh()", "error"),
        ),
        (
            "Batcher.turn",
            "rows of a removed adapter stay in the cache",
            Drop("self._cache.forget"),
        ),
        (
            "Batcher.turn",
            "what needs no forward ends the turn",
            Swap(
                "self._settle(self._submit(engine, flush))",
                "return self._settle(self._submit(engine, flush))",
            ),
        ),
        ("Batcher._take", "what a closed loop left behind is sent", Drop("self._cancel")),
        ("Batcher.leave", "the engine is not told of a withdrawn request", Drop("self._wake")),
        (
            "Batcher._step",
            "the rest of a failed step is not withdrawn from the engine",
            Drop("engine.cancel"),
        ),
    ),
    *breaks(
        "runtime.batcher",
        "test_queue.py test_recovery.py",
        (
            "Batcher.close",
            "who waits for room is not told of the close",
            Swap("self._in_line()", "()"),
        ),
        (
            "Batcher._requeue",
            "what ran out of memory goes behind what came later",
            Swap("reversed(again)", "again"),
        ),
        (
            "Batcher._requeue",
            "what was cancelled is sent again after running out of memory",
            Swap("entry in self._withdrawn", "False"),
        ),
    ),
    *breaks(
        "runtime.batcher",
        "test_engine_thread.py",
        (
            "Batcher.close",
            "who closes in the middle of a question goes on in it",
            Swap("self.lock._is_owned()", "False"),
        ),
    ),
    *breaks(
        "engines.completions",
        "test_completions.py",
        (
            "Writing.law",
            "a stop token may be drawn before min_tokens are",
            Swap("len(drawn) < decoding.min_tokens", "False"),
        ),
        (
            "Writing._stop",
            "a stop string over two tokens is missed",
            Swap("max(0, seen - len(stop) + 1)", "seen"),
        ),
    ),
    *breaks(
        "structures.guides",
        "test_completion_laws.py test_structures.py",
        (
            "Guide.words",
            "an incomplete text may end",
            Swap("self._matcher.is_accepting()", "True"),
        ),
        (
            "Guides.begin",
            "two texts of a structure share their place in it",
            Swap("start.deep_copy()", "start"),
        ),
    ),
    *breaks(
        "questions.completions",
        "test_completions.py",
        (
            "completion_requests",
            "the texts of a seeded batch are all the same",
            Swap("seed_at(seed, place)", "seed"),
        ),
    ),
    *breaks(
        "runtime.batcher",
        "test_batcher.py",
        (
            "Batcher._register",
            "a request that was withdrawn stays so when it is asked again",
            Drop("self._withdrawn.pop"),
        ),
        (
            "Batcher._register",
            "an equal question does not join one in flight",
            Swap("entry is None", "entry is None or entry.in_flight"),
        ),
        (
            "Batcher._removable",
            "an adapter is removed while requests are bound to it",
            Instead("return list(self._retired)"),
        ),
    ),
    *breaks(
        "runtime.batcher",
        "test_batcher.py",
        (
            "Batcher._take_ready",
            "the newest requests go first",
            Swap("ready.popitem(last=False)", "ready.popitem(last=True)"),
        ),
    ),
    *breaks(
        "runtime.batcher",
        "test_queue.py test_recovery.py",
        (
            "Batcher._must_wait",
            "newcomers overtake those who wait for room",
            Swap("not self._line", "True"),
        ),
        (
            "Batcher._enter",
            "one client's questions all enter before the next one's",
            Drop("self._line.move_to_end"),
        ),
        (
            "Batcher._leave_queue",
            "the bytes of what left the queue are counted for ever",
            Swap("self._queued_bytes -= entry.request.nbytes", "pass"),
        ),
        (
            "Batcher._settle",
            "after running out of memory flushes stay small for good",
            Swap("2 * self.most_in_flight", "self.most_in_flight"),
        ),
    ),
    *breaks(
        "runtime.batcher",
        "test_weights.py",
        (
            "_size",
            "a population takes the room of one request in the queue",
            Swap("weight += request.weight", "weight += 1"),
        ),
        (
            "Batcher._take_ready",
            "what is larger than all the room is never sent",
            Swap("weight > room and not is_idle", "weight > room"),
        ),
        (
            "Batcher._send_less",
            "after running out of memory populations are halved as one request each",
            Swap("self._flight_weight // 2", "len(self._flight) // 2"),
        ),
    ),
    *breaks(
        "runtime.batcher",
        "test_batcher.py test_draw.py",
        (
            "_own",
            "waiters get views of the step's rows",
            Swap(
                "apart(shared)",
                "shared",
            ),
        ),
        (
            "_own",
            "who asked for the same likeliest tokens share their tensors",
            Swap("request.owned(result)", "result"),
        ),
        (
            "_resolve_all",
            "whether a future is done already is not looked at",
            Swap("_IS_DONE", "contextlib.nullcontext()"),
        ),
    ),
    *breaks(
        "runtime.batcher",
        "test_simulation.py",
        (
            "deliver",
            "a loop that was closed keeps the others' answers from them",
            Swap("RuntimeError", "LookupError"),
        ),
        only="fixed_seeds",
    ),
    *breaks(
        "runtime.streams",
        "test_simulation.py",
        (
            "Flow._add",
            "a text that was begun anew is brought from its beginning",
            Swap("len(self.token_ids) - delta.start", "0"),
        ),
        only="fixed_seeds",
    ),
    *breaks(
        "runtime.ask",
        "test_simulation.py",
        ("Asker._deltas", "a stream that is left goes on", Drop("batcher.leave")),
        (
            "Asker._deltas",
            "an error that comes after a stream was left is complained of",
            Swap("future.cancel()", "True"),
        ),
        only="fixed_seeds",
    ),
    *breaks(
        "runtime.cache",
        "test_cache.py",
        (
            "RowCache._put",
            "the cache keeps the step's row itself, a view",
            Swap("apart([row for _, row in kept])", "[row for _, row in kept]"),
        ),
        (
            "RowCache.forget",
            "with an adapter go all that have its name",
            Swap(
                "request.adapter == adapter",
                "request.adapter and request.adapter.name == adapter.name",
            ),
        ),
    ),
    *breaks(
        "runtime.answers",
        "test_population_answers.py",
        (
            "AnsweringEngine.step",
            "the other rows of a population that failed stay asked for",
            Swap("self.cancel([*failed])", "None"),
        ),
        (
            "AnsweringEngine.step",
            "a population fails once for every row that does",
            Swap("reader not in failed", "True"),
        ),
    ),
    *breaks(
        "runtime.answers",
        "test_population_answers.py",
        (
            "FoundRows.__init__",
            "a population waits for a row as often as it is in it",
            Swap("len(self.distinct)", "len(asked)"),
        ),
    ),
    *breaks(
        "runtime.answers",
        "test_answers.py test_draw.py",
        (
            "AnsweringEngine._without",
            "the last who reads from a row takes it from who asked for it",
            Swap("row.is_asked", "False"),
        ),
        (
            "AnsweringEngine.step",
            "reads of a failed step are still thought to be in progress",
            Drop("self._forget"),
        ),
    ),
    *breaks(
        "runtime.thread",
        "test_engine_thread.py test_recovery.py",
        (
            "EngineThread._run",
            "a call that was cancelled ends the thread",
            Swap("future.set_running_or_notify_cancel()", "True"),
        ),
        (
            "EngineThread._may_restart",
            "an engine that dies of every question is opened for ever",
            Swap("self._answered != before", "True"),
        ),
        (
            "EngineThread._open",
            "after a restart the adapters are gone",
            Drop("self._batcher.fail"),
        ),
        ("EngineThread.round", "the engine is left open", Drop("answering.close")),
        (
            "EngineThread._end",
            "calls that came too late are never answered",
            Drop("future.set_exception"),
        ),
    ),
    *breaks(
        "runtime.thread",
        "test_engine_thread.py test_recovery.py",
        (
            "EngineThread.batcher",
            "a forked child uses the thread of its parent",
            Instead("return self._batcher"),
        ),
    ),
    *breaks(
        "questions.completions",
        "test_lm.py",
        (
            "sample_requests",
            "samples without a seed share one draw",
            Swap("next(nonces)", "0"),
        ),
    ),
    *breaks(
        "runtime.adapters",
        "test_lm.py",
        (
            "AdapterNames._retire",
            "weights that were loaded over stay in the engine",
            Drop("self._thread.batcher.retire"),
        ),
    ),
    *breaks(
        "numbers",
        "test_numbers.py",
        ("check_int", "True is the number 1", Swap("is_truth_value(value)", "False")),
    ),
    *breaks(
        "questions.draws",
        "test_answers.py test_draw.py",
        (
            "_drawn",
            "the draws of a step share their randomness",
            Swap("[seed_of(each) for each in asked]", "[seed_of(asked[0]) for each in asked]"),
        ),
        (
            "_masks",
            "beside masked draws those without a mask may draw nothing",
            Swap(r"b'\xff'", r"b'\x00'"),
        ),
    ),
    *breaks(
        "questions.draws",
        "test_engine.py",
        (
            "DrawToken.__eq__",
            "draws under different masks are one",
            Swap("self.mask == other.mask", "True"),
        ),
    ),
    *breaks(
        "questions.contexts",
        "test_engine.py",
        (
            "Adapter",
            "the version of an adapter's weights is no part of the key",
            Swap("version: int", "version: int = __import__('dataclasses').field(compare=False)"),
        ),
        ("abbreviated", "messages hold whole prompts", Swap("4", "4096")),
    ),
    *breaks(
        "questions.token_ids",
        "test_arguments.py",
        (
            "id_words",
            "the first token id past the vocabulary passes",
            Swap(
                "words[np.frombuffer(words, np.uint32).argmax()] >= vocab_size",
                "words[np.frombuffer(words, np.uint32).argmax()] > vocab_size",
            ),
        ),
    ),
    *breaks(
        "questions.masks",
        "test_draw.py test_masks.py",
        (
            "packed_mask",
            "bits beyond the vocabulary make another mask",
            Swap("last >> beyond", "False"),
        ),
    ),
    *breaks(
        "questions.rows",
        "test_arguments.py test_lm.py",
        (
            "check_length",
            "the longest context is refused",
            Swap("count > limits.max_model_len", "count >= limits.max_model_len"),
        ),
    ),
    *breaks(
        "questions.scores",
        "test_arguments.py test_draw.py",
        (
            "ScoreRequest.rows",
            "a score sees the token that it scores",
            Swap(
                "range(TOKEN_BYTES * self.start, most, TOKEN_BYTES)",
                "range(TOKEN_BYTES * (self.start + 1), most + 1, TOKEN_BYTES)",
            ),
        ),
    ),
    *breaks(
        "tokens.rows",
        "test_rows.py",
        (
            "stacked",
            "a caller's stack is a view of the step",
            Swap("whole.clone(memory_format=torch.contiguous_format)", "whole"),
        ),
    ),
    *breaks(
        "tokens.sampling",
        "test_sampling.py test_numbers.py",
        (
            "mixed",
            "every token of a seeded sample has the same randomness",
            Swap("step + 1", "1"),
        ),
        (
            "_inverse",
            "a token of probability 0 is drawn by a uniform of 0",
            Swap(
                "sums > sums.amax(dim=-1, keepdim=True) * uniforms",
                "sums >= sums.amax(dim=-1, keepdim=True) * uniforms",
            ),
        ),
        (
            "_numbers",
            "a row's draw depends on the generators of others",
            Swap(
                "torch.cat([_rand(1, generator) for generator in generators])",
                "_rand(count, generators[0])",
            ),
        ),
        (
            "drawn",
            "a dead end draws the first token",
            Swap("token_ids.double().masked_fill_(dead, -1.0)", "token_ids.double()"),
        ),
    ),
    *breaks(
        "inference.resampling",
        "test_resampling.py",
        ("_inverse", "a weight of 0 has children", Swap("'right'", "'left'")),
        (
            "residual",
            "the remainders count what is certain a second time",
            Swap("expected - certain", "expected"),
        ),
    ),
    *breaks(
        "inference.smc",
        "test_inference.py",
        (
            "SMC._resampled",
            "resampling forgets the evidence so far",
            Swap("np.full(count, state.log_evidence)", "np.zeros(count)"),
        ),
        (
            "SMC.step",
            "resampling leaves the particles where they are",
            Swap("[state.particles[ancestor] for ancestor in ancestors.tolist()]", "particles"),
        ),
    ),
    *breaks(
        "inference.checks",
        "test_inference.py",
        ("seeds_of_step", "every step has the same randomness", Swap("(step, kind)", "(0, kind)")),
    ),
    *breaks(
        "inference.blocks",
        "test_blocks.py",
        (
            "Blocks.log_weights",
            "what a token was drawn with is left out of its weight",
            Swap("block.logprob", "0.0"),
        ),
        (
            "Blocks.log_weights",
            "the model that weighs is not tempered",
            Swap("self.temperature", "1.0"),
        ),
        (
            "Block.after",
            "the last token's probability stands for the block's",
            Swap("self.logprob + drawn[1]", "drawn[1]"),
        ),
        (
            "Blocks.is_over",
            "a text waits until the end for its weight",
            Swap("min(self.size, self.max_tokens - block.before.count)", "self.max_tokens"),
        ),
        (
            "Blocks.grown",
            "a block forgets the twist that its text has gained",
            Swap("before.log_twist", "0.0"),
        ),
        only="not vllm and (weight or twist or rejection or question)",
    ),
    *breaks(
        "inference.proposals",
        "test_blocks.py",
        (
            "_drawn",
            "a proposed token counts as drawn without a mask",
            Swap("found.logprobs.tolist()", "(found.logprobs + found.log_mass).tolist()"),
        ),
        (
            "Proposals._by_rejection",
            "the estimated mass is no part of a proposal's probability",
            Swap("math.log(weight) - log_mass", "math.log(weight)"),
        ),
        (
            "Proposals._by_rejection",
            "each stop token is proposed with the probability of all",
            Swap("endings[place, stop]", "weight"),
        ),
        only="not vllm and (weight or twist or rejection or question)",
    ),
    *breaks(
        "inference.proposals",
        "test_inference.py test_text_model.py test_stops.py",
        (
            "_drawn",
            "a weight grows by the token's probability, not by the mass of what may follow",
            Swap("found.log_mass", "found.logprobs"),
        ),
        (
            "Proposals._masks",
            "a text may end at the last step where it is not complete",
            Swap(
                "masks[torch.tensor(at_last)] &= packed_tokens(stops, masks.shape[1])",
                "masks[torch.tensor(at_last)] = packed_tokens(stops, masks.shape[1])",
            ),
        ),
    ),
    *breaks(
        "runtime.concurrency",
        "test_blocking.py",
        (
            "_Run.cancel",
            "an interrupt is raised while the run still ends",
            Drop("self.join"),
        ),
    ),
    *breaks(
        "inference.awrs",
        "test_awrs.py",
        ("draw", "one accepted token is enough", Swap("len(accepted) < 2", "len(accepted) < 1")),
    ),
    *breaks(
        "inference.programs",
        "test_programs.py",
        (
            "Execution.observe",
            "a child that runs again observes again what its parent did",
            Swap("self._is_live", "True"),
        ),
        (
            "Program._grown",
            "all children go on with the execution of their parent",
            Swap("particle.live.pop()", "particle.live[0]"),
        ),
        ("Execution.sample", "a mask's mass is not observed", Drop("self._weigh")),
    ),
    *breaks(
        "inference.metropolis",
        "test_metropolis.py",
        (
            "_log_ratio",
            "lengths do not count in the ratio",
            Swap("math.log(len(chain.growths) / len(new))", "0.0"),
        ),
    ),
    *breaks(
        "constraints.grammars",
        "test_constraints.py test_walks.py",
        (
            "_Vocabulary.fill",
            "a text may end where it is not complete",
            Swap("state.accepting", "True"),
        ),
        (
            "GrammarState.here",
            "advancing a state changes it for those who share its walk",
            Swap("walk.matcher.deep_copy()", "walk.matcher"),
        ),
    ),
    *breaks(
        "runtime.concurrency",
        "test_predicates.py",
        ("ConcurrentCalls.about", "a cancelled check goes on in its thread", Drop("stop.set")),
    ),
    *breaks(
        "constraints.products",
        "test_products.py",
        (
            "ProductState._computed",
            "one factor of a product is enough",
            Swap("np.bitwise_and", "np.bitwise_or"),
        ),
    ),
    *breaks(
        "engines.protocol",
        "test_engine.py",
        (
            "failure",
            "a CPU that ran out of memory is not understood",
            Swap("NO_CPU_MEMORY in str(error)", "False"),
        ),
    ),
    *breaks(
        "engines.stepping",
        "test_stepping.py test_exact.py test_numbers.py",
        (
            "SteppedEngine._advance",
            "one poisoned row fails its whole step",
            Swap(
                "(logits.isnan() | (logits == torch.inf)).any(-1)",
                "(logits.isnan() | (logits == torch.inf)).any()",
            ),
        ),
        (
            "SteppedEngine._unload_unused",
            "an adapter goes while a request needs it",
            Swap("each not in bound", "True"),
        ),
    ),
    *breaks(
        "engines.residency",
        "test_residency_machine.py",
        (
            "Residents.is_parent",
            "a guess may be another adapter's sequence",
            Swap("resident.adapter == adapter", "True"),
        ),
        (
            "Residents.nearest",
            "a context shares all of its tokens, the one to compute too",
            Swap("min(best[1], most)", "best[1]"),
        ),
    ),
    *breaks(
        "engines.vllm.capture",
        "test_capture.py",
        (
            "CaptureV1.apply",
            "rows are matched by the order in which requests came",
            Swap("[tickets[index] for index in indices]", "list(tickets.values())"),
        ),
        (
            "_Places.follow",
            "of two requests that swap places one is lost",
            Swap("at[source] = replaced", "pass"),
        ),
        (
            "CaptureV2.apply",
            "a slot's number is taken for its place in the step",
            Swap("np.flatnonzero(tickets >= 0)", "slots[tickets >= 0]"),
        ),
        (
            "RowStore.take",
            "rows that are not finite are answers",
            Swap("position in not_finite[id(rows)]", "False"),
        ),
        (
            "RowStore.put",
            "of a prompt's parts the first one's row stays",
            Swap(
                "self._rows[ticket] = (rows, position)",
                "self._rows.setdefault(ticket, (rows, position))",
            ),
        ),
        (
            "log_probabilities",
            "rows take the place of logits that somebody else reads",
            Swap("not may_overwrite", "False"),
        ),
    ),
    *breaks(
        "engines.vllm.positions",
        "test_positions.py",
        (
            "Positions.put",
            "a span's positions are counted from the step's first token",
            Swap("span.offset - span.computed", "span.offset"),
        ),
        (
            "Positions.put",
            "what comes again after a preemption is taken twice",
            Swap(
                "group.append(_Wanted(score, score.next, end, found))",
                "group.append(_Wanted(score, span.computed, end, found))",
            ),
        ),
        (
            "Positions.take",
            "a score lacks positions that vLLM did not show",
            Swap("score.next < score.end", "False"),
        ),
        only="runner_v2 or missed",
    ),
    *breaks(
        "engines.vllm.positions",
        "test_positions.py",
        (
            "limit_hits",
            "a prefix in the cache hides the first wanted position",
            Swap("_Shortened(request, first + 1)", "_Shortened(request, first + 2)"),
        ),
        only="long_prefix",
    ),
    *breaks(
        "questions.scores",
        "test_draw.py",
        (
            "row_chunks",
            "a text's rows begin anew with every chunk",
            Swap(
                "ScoreRequest(text, begin, adapter, wanted='rows')",
                "ScoreRequest(text, start, adapter, wanted='rows')",
            ),
        ),
        only="chunks",
    ),
    *breaks(
        "engines.vllm.engine",
        "test_positions.py",
        (
            "VLLMEngine._decode",
            "the row of a prompt's first parts is never let go",
            Drop("self._store.forget"),
        ),
        only="comes_alone",
    ),
    *breaks(
        "engines.vllm.in_progress",
        "test_positions.py",
        (
            "InProgress.end",
            "a cancelled score is kept",
            Drop("self._positions.forget"),
        ),
        only="cancelled",
    ),
    *breaks(
        "engines.vllm.self_check",
        "test_vllm_self_test.py",
        (
            "self_test",
            "half a nat passes, whatever the network computes with",
            Swap("64 * max(rounding, TF32)", "0.5"),
        ),
    ),
    *breaks(
        "engines.vllm.speculation",
        "test_residency.py",
        (
            "DecodeSteps._tokens_of",
            "a prepared step is run although its sequences have moved on",
            Swap("tokens.positions != step.positions", "False"),
        ),
        only="population or between_two_steps or cancelled_extension",
    ),
    *breaks(
        "engines.vllm.runner_v2",
        "test_runners.py",
        (
            "RunnerV2.reseat",
            "a seat keeps the blocks of the sequence before",
            Drop("self._seats.write"),
        ),
        (
            "RunnerV2.write",
            "a token is written in the place of its request in the flush",
            Swap(
                "[slots[each] for each in tokens.request_ids]",
                "[*range(len(tokens.request_ids))]",
            ),
        ),
    ),
    *breaks(
        "engines.vllm.seats",
        "test_residency.py",
        (
            "Seats.take",
            "the copy of a shared block is forgotten",
            Swap("blocks[donor.request_id][full].block_id if rest else None", "None"),
        ),
        (
            "Seats.take",
            "a fork overwrites a block that others have",
            Swap("self._pool.is_block_writable(before[full])", "True"),
        ),
        only="30-4-4 or population",
    ),
    *breaks(
        "engines.vllm.open_scheduler",
        "test_residency.py",
        (
            "OpenScheduler._evict",
            "an evicted sequence is thought to be resident",
            Drop("self._evicted.append"),
        ),
        only="30-4-4 or population",
    ),
    *breaks(
        "engines.vllm.open_scheduler",
        "test_residency.py",
        (
            "OpenScheduler.can_reseat",
            "a fork takes the seat of another adapter's sequence",
            Swap("request.lora_request != donor.lora_request", "False"),
        ),
        only="adapters",
    ),
    *breaks(
        "engines.vllm.seats",
        "test_seats.py",
        (
            "Seats.paired",
            "a fork takes any seat among long sequences",
            Swap("max(count - 1 - behind, 0)", "0"),
        ),
        (
            "Seats._take_tokens",
            "a request has another's tokens and its own hashes",
            Swap("donor.block_hashes[hashed : length // self._hashed]", "[]"),
        ),
        (
            "last_seats",
            "the blocks of a seat that was left at once are written",
            Swap("before.block_ids[: seat.kept - before.kept]", "before.block_ids"),
        ),
    ),
    *breaks(
        "engines.vllm.admission_blocks",
        "test_admission_blocks.py",
        (
            "needed_blocks",
            "blocks that are cached but free are thought to be held",
            Swap("block.ref_cnt > 0", "True"),
        ),
        only="nobody_holds",
    ),
    *breaks(
        "engines.vllm.open_scheduler",
        "test_admission_blocks.py",
        (
            "OpenScheduler._make_room",
            "sequences are evicted as if nothing were shared",
            Swap("bool(waiting)", "False"),
        ),
        only="begin_alike",
    ),
    *breaks(
        "engines.vllm.populations",
        "test_spread.py",
        (
            "SeatedPopulations.go_on",
            "a request that comes twice is as the last of the two says",
            Swap("kept.untouched(pairs)", "kept.untouched(dict(pairs).items())"),
        ),
        (
            "SeatedPopulations.spread",
            "forks that nobody has asked for are resident for nobody",
            Drop("kept.keep_later"),
        ),
    ),
    *breaks(
        "engines.vllm.speculation",
        "test_spread.py",
        (
            "DecodeSteps._part_of",
            "a step ahead answers for other tokens than it was run with",
            Swap("[ran[place] for place in places] != tokens.token_ids", "False"),
        ),
        (
            "DecodeSteps.prepare_next",
            "the runner is not told of forks that are made ahead",
            Drop("self._runner.reseat"),
        ),
    ),
    *breaks(
        "engines.vllm.runner_v2",
        "test_runners.py",
        (
            "RunnerV2.confirm",
            "what was run and not asked for counts as computed",
            Swap("len(tokens) < len(step.request_ids)", "False"),
        ),
        (
            "RunnerV2.reseat",
            "a fork made ahead is not looked up",
            Swap("self._is_moved = True", "self._is_moved = False"),
        ),
    ),
    *breaks(
        "engines.vllm.seat_tables",
        "test_runners.py",
        (
            "SeatTables.write",
            "a seat's blocks are written over those it keeps",
            Swap(
                "firsts = slots * blocks.block_tables[0].gpu.shape[1] + kept",
                "firsts = slots * blocks.block_tables[0].gpu.shape[1]",
            ),
        ),
    ),
    *breaks(
        "engines.vllm.step_launches",
        "test_runners.py",
        (
            "_Several.put",
            "tokens stand in the order of the step before",
            Swap("order != self._order", "False"),
        ),
    ),
    *breaks(
        "engines.vllm.block_copies",
        "test_block_copies.py",
        (
            "_independent",
            "a block is copied while it is written",
            Swap("source in written", "False"),
        ),
    ),
    *breaks(
        "engines.vllm.populations",
        "test_spread.py",
        (
            "SeatedPopulations._seats_all",
            "sequences that are equal at first wait for requests of their own",
            Swap("_count(several) < wanted", "False"),
        ),
    ),
    *breaks(
        "engines.vllm.populations",
        "test_vllm_populations.py",
        (
            "SeatedPopulations.go_on",
            "sequences that go on are known by what they were",
            Drop("kept.keep_later"),
        ),
        (
            "SeatedPopulations.go_on",
            "a request that is still to be computed is there to be forked",
            Swap("each not in added", "True"),
        ),
        (
            "SeatedPopulations.drawn",
            "rows are taken in the order of the batch",
            Swap("seats.request_ids != request_ids", "False"),
        ),
        only="not random",
    ),
    *breaks(
        "populations.batches",
        "test_batches.py",
        (
            "Batches._origins",
            "a key decides which context another one goes on from",
            Swap(
                "numbers is not None and _go_on(batch.contexts, contexts, numbers)",
                "numbers is not None",
            ),
        ),
        (
            "Batches._grown",
            "contexts go on from those of another adapter",
            Swap(
                "batch.adapter == adapter and len(batch.contexts) == len(contexts)",
                "len(batch.contexts) == len(contexts)",
            ),
        ),
        (
            "Batches.draw",
            "masks are read when they are asked with, and later",
            Swap(
                "packed_masks(masks, count, home.limits.vocab_size, copies=True)",
                "packed_masks(masks, count, home.limits.vocab_size)",
            ),
        ),
        (
            "_Batch.answered",
            "contexts are numbered as they came, whatever order they were asked in",
            Swap("numbers[places] = np.arange(len(places))", "numbers[:] = np.arange(len(places))"),
        ),
        (
            "_Held.grown",
            "an id that may become another number is taken for the one it was",
            Swap("{int}.issuperset(map(type, chain(*self.lists)))", "True"),
        ),
        (
            "_new_tokens",
            "a list that was changed inside is drawn after as it was",
            Swap("before != context", "False"),
        ),
    ),
    *breaks(
        "populations.batches",
        "test_batch_walks.py",
        (
            "Batches._remember",
            "two that ask after the same contexts go on each from its own",
            Swap("each.equals(batch)", "False"),
        ),
        only="at_once_after",
    ),
    *breaks(
        "runtime.answers",
        "test_batch_walks.py",
        (
            "_Populations.go_on",
            "two that go on alike have their rows computed twice",
            Swap("alike == 1", "True"),
        ),
        only="at_once_after",
    ),
    *breaks(
        "populations.home",
        "test_population_walks.py",
        (
            "Home.give_back",
            "what a copy goes on from is given back with the original",
            Swap("not each.users", "True"),
        ),
        only="copy_goes",
    ),
    *breaks(
        "engines.vllm.open_requests",
        "test_vllm_populations.py",
        (
            "OpenRequests.left",
            "a sequence that somebody else used is as it was",
            Swap("asked_in.get(n) == flush", "True"),
        ),
    ),
    *breaks(
        "questions.origins",
        "test_origins.py",
        (
            "Origins.cut",
            "a sequence that is cut goes on from what it was",
            Swap("lengths < self.lengths", "lengths < 0"),
        ),
    ),
    *breaks(
        "generation.journal",
        "test_jobs.py",
        (
            "Journal.begin",
            "a partial line of a killed job stays",
            Drop("os.ftruncate"),
        ),
        only="kill_at_any_byte",
    ),
    *breaks(
        "generation.runs",
        "test_jobs.py",
        (
            "JobRun._compare",
            "an answered row may change",
            Swap("was not in (0, row.digest)", "False"),
        ),
        (
            "JobRun._end",
            "what ended with an interrupt is lost",
            Instead("await walk.close()"),
        ),
        only="changed or cancellation",
    ),
    *breaks(
        "interop.foreign",
        "test_genlm.py",
        (
            "importing",
            "the environment that genlm-backend edits stays edited",
            Drop("os.environ.update"),
        ),
        only="process",
    ),
)
