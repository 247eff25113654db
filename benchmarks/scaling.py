"""How does the router do over 1,000 replicas, and how do they recover? The real one, on a virtual clock.

    python -m benchmarks.scaling --replicas 1000 --json scaling.json

Texts grow step after step; replicas answer within one, and are killed, or fall silent, now and then.
One JSON object: CPU microseconds of the router and the health machine ``per_question`` and ``per_tick``;
``stayed``, the share of a text's steps that went where its last one did while nobody died;
``moved`` and ``given_up``, questions sent to another replica, and those that ended with too many deaths;
``silent_seconds``, the most virtual seconds between a replica's silence and its replacement.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.setups import append
from genrt.cluster.fleet import Fleet
from genrt.cluster.health import ReplicaLimits
from genrt.cluster.routing import Router
from genrt.engines.protocol import Finished
from genrt.questions.draws import DrawToken
from genrt.questions.reads import ReadRequest
from genrt.questions.rows import LogprobsRequest

OPEN_SECONDS = 60.0
"""How long a simulated replica takes to open."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--texts", type=int, default=4000, help="texts that grow by a token a step")
    parser.add_argument("--steps", type=int, default=60, help="seconds, of a step each")
    parser.add_argument(
        "--deaths", type=float, default=0.5, help="replicas lost a step, in the mean"
    )
    parser.add_argument("--quick", action="store_true", help="few replicas and steps")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.replicas, arguments.texts, arguments.steps = 20, 60, 20
    result = simulated(arguments.replicas, arguments.texts, arguments.steps, arguments.deaths)
    print(json.dumps(result))
    append(json.dumps(result), arguments.json)


def simulated(count: int, texts: int, steps: int, deaths: float, seed: int = 0) -> dict[str, Any]:
    """Let texts grow over so many replicas, and return what became of them."""
    chosen = random.Random(seed)
    limits = ReplicaLimits(probe_seconds=1.0, most_silent=5, most_restarts=100)
    fleet = Fleet(count, limits, Router(count, seed=seed))
    opening = {number: 0.0 for number in range(count)}
    silent: dict[int, float] = {}
    contexts = {each: [each, *(chosen.randrange(1000) for _ in range(20))] for each in range(texts)}
    waiting: dict[Any, int] = {}
    home: dict[int, int] = {}
    asked = ended = given_up = stayed = went = 0
    longest = routing = ticking = 0.0
    for now in map(float, range(steps)):
        started = time.process_time()
        for each in fleet.to_probe():
            if each.number not in silent and each.health.lives:
                fleet.answered_probe(each.number, each.life)
        fleet.tick(now)
        for each in fleet.to_kill():
            fleet.died(each.number, each.life, "silent")
        for each in fleet.to_start(now):
            if (since := silent.pop(each.number, None)) is not None:
                longest = max(longest, now - since)
            opening[each.number] = now + OPEN_SECONDS
        for number in [each for each, due in opening.items() if due <= now]:
            del opening[number]
            fleet.opened(number, fleet.replicas[number].life, now)
        for each in fleet.to_renew():
            fleet.renewed(each.number, each.life, fleet.settings, now)
        ticking += time.process_time() - started
        lost = sum(chosen.random() < deaths / count for _ in range(count))
        for each in chosen.sample(fleet.serving, min(lost, len(fleet.serving))):
            if chosen.random() < 0.5:
                silent[each.number] = now
            else:
                fleet.died(each.number, each.life, "killed")
        fresh = {
            ReadRequest(LogprobsRequest(contexts[each]), DrawToken(None, 1.0, None, 0)): each
            for each in contexts.keys() - waiting.values()
        }
        waiting |= fresh
        asked += len(fresh)
        started = time.process_time()
        fleet.submit(fresh)
        placed = fleet.place()
        routing += time.process_time() - started
        for number, requests in placed.items():
            for request in requests:
                text = waiting[request]
                before = home.get(text)
                if before is not None and fleet.replicas[before].health.serves:
                    went += 1
                    stayed += before == number
                home[text] = number
        for replica in fleet.replicas:
            if replica.number in silent or not replica.work:
                continue
            ends = [Finished(request, result=1) for request in replica.work]
            started = time.process_time()
            fleet.worked(replica.number, replica.life, now)
            finished = fleet.ended(replica.number, replica.life, ends)
            routing += time.process_time() - started
            for end in finished:
                ended += 1
                given_up += end.error is not None
                contexts[waiting.pop(end.request)].append(chosen.randrange(1000))
    return {
        "replicas": count,
        "texts": texts,
        "steps": steps,
        "asked": asked,
        "ended": ended,
        "in_flight": len(fleet),
        "moved": fleet.moved,
        "given_up": given_up,
        "stayed": stayed / max(went, 1),
        "silent_seconds": longest,
        "serving": len(fleet.serving),
        "per_question": 1e6 * routing / max(asked, 1),
        "per_tick": 1e6 * ticking / steps,
    }


if __name__ == "__main__":
    main()
