"""Are vLLM's rows the model's? Rows of one mixed flush against transformers, on the device at hand.

    python -m benchmarks.fidelity --model tiny --runner V1 --runner V2 --json fidelity.json

One JSON object per runner: ``worst`` and ``typical`` (median over prompts) are the largest absolute
differences of log-probabilities over -15 from transformers' float32 rows; ``crossed`` counts rows that
are nearer to another prompt's reference than to their own; ``walk_…`` are the same for particles that
grow, fork, are cut back and edited, their rows by resident sequences; ``drawn_worst`` is how far the
log-probabilities of drawn tokens are from the model's, in particles that go on with what they drew, or
with something else, ``speculated`` of its steps run before they were asked for; ``ms_per_flush`` is
the median time of the flush, ``reads_worst`` how far draws' masses, top lists and host rows are from the
rows they were read from, at ``host_bytes_per_draw``; ``sample_ratio`` the time of genrt's
``batch_sample`` over that of vLLM's own loop.
Each runner needs a process of its own, since vLLM reads its choice from the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.checkpoints import make_model
from benchmarks.setups import append


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--model", default="tiny", help="tiny, 1b, sliding, embedded, or a directory"
    )
    parser.add_argument(
        "--runner", action="append", choices=["V1", "V2"], help="default: vLLM's own"
    )
    parser.add_argument("--dtype", default="float32", help="of vLLM; the reference is float32")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--longest", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sample-tokens", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="few prompts and repeats")
    parser.add_argument("--options", default="{}", help="engine_options, as JSON")
    parser.add_argument("--json", type=Path, help="append the results to this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.prompts, arguments.repeats, arguments.sample_tokens = 32, 2, 8
    if arguments.runner is None or len(arguments.runner) == 1:
        for runner in arguments.runner or ():
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "V2"))
        result = measure(arguments)
        print(json.dumps(result))
        append(json.dumps(result), arguments.json)
        return
    others = [a for a in sys.argv[1:] if a not in ("--runner", "V1", "V2")]
    for runner in arguments.runner:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.fidelity", *others, "--runner", runner], check=True
        )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import genrt

    with tempfile.TemporaryDirectory() as directory:
        model = make_model(arguments.model, Path(directory))
        options = {"dtype": arguments.dtype, **json.loads(arguments.options)}
        if arguments.model in ("tiny", "1b", "sliding"):
            options["skip_tokenizer_init"] = True
        with genrt.load(model, engine_options=options, cache_bytes=0) as lm:
            prompts = mixed_prompts(arguments.prompts, arguments.longest, lm.vocab_size)
            rows = lm.batch_next_token_logprobs_sync(prompts)
            flushes = []
            for _ in range(arguments.repeats):
                started = time.perf_counter()
                lm.batch_next_token_logprobs_sync(prompts)
                flushes.append(time.perf_counter() - started)
            walked = walk(lm, steps=10 if arguments.quick else 25)
            drawn = drawing(lm, steps=12 if arguments.quick else 40)
            statistics_after = lm.statistics().engine
            reads_worst, bytes_per_draw = reads(lm, prompts[:32])
            ratio = sample_ratio(lm, prompts, arguments.sample_tokens, arguments.repeats)
            engine = lm._thread.engine
            rows = rows.cpu()
            device = str(lm.device)
        reference = reference_rows(model, prompts, device)
        likely = reference > -15.0
        differences = torch.where(likely, (rows - reference).abs(), 0.0).amax(dim=-1)
        contexts = [context for context, _ in walked]
        walk_rows = torch.stack([row.cpu() for _, row in walked])
        walk_reference = reference_rows(model, contexts, device)
        walk_apart = torch.where(
            walk_reference > -15.0, (walk_rows - walk_reference).abs(), 0.0
        ).amax(dim=-1)
        drawn_reference = reference_rows(model, [context for context, _, _ in drawn], device)
        drawn_worst = max(
            abs(float(row[token_id]) - logprob)
            for row, (_, token_id, logprob) in zip(drawn_reference, drawn, strict=True)
            if row[token_id] > -15.0
        )
        return {
            "model": arguments.model,
            "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
            "runner": getattr(engine, "runner", None),
            "dtype": arguments.dtype,
            "prompts": len(prompts),
            "worst": round(float(differences.max()), 6),
            "typical": round(float(differences.median()), 6),
            "crossed": crossed(rows, reference, prompts),
            "walk_rows": len(walked),
            "walk_worst": round(float(walk_apart.max()), 6),
            "walk_typical": round(float(walk_apart.median()), 6),
            "walk_crossed": crossed(walk_rows, walk_reference, contexts),
            "extended": statistics_after.extended,
            "forked": statistics_after.forked,
            "evicted": statistics_after.evicted,
            "drawn_worst": round(drawn_worst, 6),
            "prepared": statistics_after.prepared,
            "speculated": statistics_after.speculated,
            "reads_worst": round(reads_worst, 6),
            "host_bytes_per_draw": bytes_per_draw,
            "ms_per_flush": round(statistics.median(flushes) * 1e3, 2),
            "sample_ratio": round(ratio, 3),
            "torch": torch.__version__,
        }


def walk(lm: Any, *, steps: int) -> list[tuple[list[int], torch.Tensor]]:
    """Contexts and rows of 24 particles that grow by a token, fork, jump, are cut back and edited."""
    random = Random(2)

    def tokens(count: int) -> list[int]:
        return [random.randrange(lm.vocab_size) for _ in range(count)]

    population = [tokens(40) for _ in range(24)]
    asked: list[tuple[list[int], torch.Tensor]] = []
    for _ in range(steps):
        parents = [
            list(p) if random.random() < 0.7 else random.choice(population) for p in population
        ]
        population = []
        for parent in parents:
            kind = random.random()
            if kind < 0.8:
                child = [*parent, *tokens(1)]
            elif kind < 0.87:
                child = [*parent, *tokens(random.randrange(2, 30))]
            elif kind < 0.94:
                child = parent[: max(1, len(parent) - random.randrange(1, 20))]
            else:
                child = [*parent[:-4], *tokens(4)]
            population.append(child)
        rows = lm.batch_next_token_logprobs_sync(population)
        asked += zip(population, rows, strict=True)
    return asked[-240:]


def drawing(lm: Any, *, steps: int) -> list[tuple[list[int], int, float]]:
    """Contexts, drawn tokens and their log-probabilities, of 24 particles. Every sixth step some of them
    go on with another token, every tenth half of them are resampled."""
    random = Random(3)
    particles = [[random.randrange(lm.vocab_size) for _ in range(40)] for _ in range(24)]
    drawn: list[tuple[list[int], int, float]] = []
    for step in range(1, steps + 1):
        draws = lm.batch_draw_sync(particles, seed=1000 * step)
        tokens = draws.token_ids.tolist()
        drawn += zip(map(list, particles), tokens, draws.logprobs.tolist(), strict=True)
        for particle, token_id in zip(particles, tokens, strict=True):
            other = step % 6 == 0 and random.random() < 0.3
            particle.append(random.randrange(lm.vocab_size) if other else token_id)
        if step % 10 == 0:
            particles = [list(random.choice(particles)) for _ in particles]
    return drawn[-240:]


def reads(lm: Any, contexts: Sequence[list[int]]) -> tuple[float, float]:
    """The largest difference of what is read on the device from the rows, and bytes moved a draw."""
    rows = lm.batch_next_token_logprobs_sync(contexts)
    allowed = list(range(0, lm.vocab_size, 3))
    before = lm.statistics().engine.bytes_to_host
    drawn = lm.batch_draw_sync(contexts, masks=[allowed] * len(contexts), seed=1)
    bytes_per_draw = (lm.statistics().engine.bytes_to_host - before) / len(contexts)
    masses = rows[:, allowed].logsumexp(dim=-1).cpu()
    worst = float((drawn.log_mass - masses).abs().max())
    chosen = rows.cpu()[torch.arange(len(contexts)), drawn.token_ids] - masses
    worst = max(worst, float((drawn.logprobs - chosen).abs().max()))
    worst = max(worst, float(bool((drawn.token_ids % 3).any())))
    on_host = lm.batch_next_token_logprobs_sync(contexts, device="cpu")
    worst = max(worst, float((on_host - rows.cpu()).abs().nan_to_num().max()))
    top = lm.top_logprobs_sync(contexts[0], 5)
    return max(
        worst, float((top.logprobs - rows[0].cpu().topk(5).values).abs().max())
    ), bytes_per_draw


def mixed_prompts(count: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Prompts of 1..``longest`` tokens, every eighth equal to an earlier one."""
    generator = torch.Generator().manual_seed(1)
    prompts: list[list[int]] = []
    for number in range(count):
        if number % 8 == 7:
            prompts.append(list(prompts[number // 2]))
            continue
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        prompts.append(torch.randint(0, vocab_size, (length,), generator=generator).tolist())
    return prompts


def reference_rows(model: str | None, prompts: Sequence[list[int]], device: str) -> torch.Tensor:
    """transformers' float32 rows, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    from genrt import models

    torch.backends.cuda.matmul.allow_tf32 = False
    network = AutoModelForCausalLM.from_pretrained(models.resolve(model), dtype=torch.float32)
    network = network.to(device).eval()
    rows = []
    with torch.no_grad():
        for prompt in prompts:
            logits = network(torch.tensor([prompt], device=device)).logits[0, -1]
            rows.append(logits.float().log_softmax(dim=-1).cpu())
    return torch.stack(rows)


def crossed(rows: torch.Tensor, reference: torch.Tensor, prompts: Sequence[list[int]]) -> int:
    nearest = torch.cdist(rows.exp(), reference.exp()).argmin(dim=-1).tolist()
    return sum(prompts[i] != prompts[j] for i, j in enumerate(nearest))


def sample_ratio(lm: Any, prompts: Sequence[list[int]], tokens: int, repeats: int) -> float:
    """genrt's ``batch_sample`` against the same requests put straight to the same vLLM engine."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    contexts = list(prompts[:64])

    def bare(answering: Any) -> None:
        engine = answering.engine
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        with engine._globals:
            for number, prompt in enumerate(contexts):
                request = EngineCoreRequest(
                    f"bare-{number}", prompt, None, params, None, 0.0, None, None, None
                )
                engine._core.add_request(request)
            ended = 0
            while ended < len(contexts):
                outputs = engine._core.get_output().outputs
                ended += sum(output.finish_reason is not None for output in outputs)

    times: dict[str, list[float]] = {"bare": [], "genrt": []}
    for _ in range(repeats + 1):
        started = time.perf_counter()
        lm._thread.call(bare).result()
        times["bare"].append(time.perf_counter() - started)
        started = time.perf_counter()
        lm.batch_sample_sync(contexts, max_tokens=tokens)
        times["genrt"].append(time.perf_counter() - started)
    return statistics.median(times["genrt"][1:]) / statistics.median(times["bare"][1:])


if __name__ == "__main__":
    main()
