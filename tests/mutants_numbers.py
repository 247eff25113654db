"""The mutation list, continued: what computes and what is computed. ``mutants.py`` has the rest, and says
what it is for."""

from __future__ import annotations

from tests.mutants import Mutant, breaks

__all__ = ["OF_THE_NUMBERS"]

OF_THE_NUMBERS: tuple[Mutant, ...] = (
    *breaks(
        "tokens/sampling.py",
        "test_sampling.py test_numbers.py",
        (
            "every token of a seeded sample has the same randomness",
            "(step + 1) * 0x9E37",
            "1 * 0x9E37",
        ),
        (
            "min-p counts from the row before it is tempered",
            "kept.masked_fill(kept < floor.log() * heat, -math.inf)",
            "kept.masked_fill(kept < floor.log(), -math.inf)",
        ),
        (
            "a temperature beyond the rows' type divides by infinity",
            "return heat.clamp(max=torch.finfo(dtype).max).to(dtype)",
            "return heat.to(dtype)",
        ),
        (
            "top-k looks for ties after a temperature that makes some",
            "kept.masked_fill((kept < last) & (ranks < width), -math.inf)",
            "kept.masked_fill((kept / heat.float() < last / heat.float()) & (ranks < width), -math.inf)",
        ),
        (
            "top-p drops the token that reaches it",
            ".cumsum(dim=-1) <= 1 - nucleus",
            ".cumsum(dim=-1) < 1",
        ),
        (
            "the weight of a tempered draw is that of the tempered row",
            "masked_fill_(dead, -1.0), logprobs, log_mass]",
            "masked_fill_(dead, -1.0), logprobs, peak + log_total]",
        ),
        (
            "a dead end draws the first token",
            "token_ids.double().masked_fill_(dead, -1.0)",
            "token_ids.double()",
        ),
        (
            "a token of probability 0 is drawn by a uniform of 0",
            "passed = sums > sums.amax",
            "passed = sums >= sums.amax",
        ),
        (
            "a seed's two numbers are one",
            "np.array([[1, 2]], dtype=np.uint64)",
            "np.array([[1, 1]], dtype=np.uint64)",
        ),
        (
            "a row's draw depends on the generators of others",
            "torch.cat([_rand(1, generator) for generator in generators])",
            "_rand(count, generators[0])",
        ),
        (
            "greedy takes the last of equally likely tokens",
            "torch.where(batch == peak, indices, width).min(",
            "torch.where(batch == peak, indices, -1).max(",
        ),
    ),
    *breaks(
        "tokens/trie.py",
        "test_trie.py",
        (
            "the largest weight of a prefix is 0 or more",
            "torch.clone, torch.maximum, -torch.inf",
            "torch.clone, torch.maximum, 0.0",
        ),
    ),
    *breaks(
        "tokens/encoding.py",
        "test_encoding.py",
        (
            "what is lost beside an added token is taken for white space",
            'WHITE = r"[^\\S\\x1c-\\x1f]*"',
            'WHITE = r"\\s*"',
        ),
        (
            "what the tokenizer makes of a chat is not looked at",
            "    _check_kept(tokenizer, text, token_ids)\n    return token_ids\n\n\ndef _check_messages",
            "    return token_ids\n\n\ndef _check_messages",
        ),
        (
            "added tokens that swallow no spaces may lose them",
            'WHITE if token.rstrip else " ?"',
            "WHITE",
        ),
    ),
    *breaks(
        "tokens/vocabulary.py",
        "test_vocabulary.py",
        (
            "bytes that are special tokens are their names",
            "if is_literal and not is_byte",
            "if is_literal",
        ),
        (
            "bytes that are special tokens are no text",
            "    if _falls_back_to_bytes(specification):",
            "    if False:",
        ),
        (
            "nobody hears of tokens in doubt",
            "    if doubtful:\n",
            "    if False:\n",
        ),
    ),
    *breaks(
        "inference/resampling.py",
        "test_resampling.py",
        (
            "systematic resampling draws a uniform for each stratum",
            "return _by_strata(log_weights, rng.random())",
            "return _by_strata(log_weights, rng.random(len(log_weights)))",
        ),
        (
            "a weight of 0 has children",
            'below_one, side="right")',
            'below_one, side="left")',
        ),
        (
            "what is a whole number of children but for rounding is not one",
            "return _whole(normalised(log_weights) * len(log_weights), log_weights)",
            "return normalised(log_weights) * len(log_weights)",
        ),
        (
            "a stratum's point reaches the next stratum",
            "np.minimum(np.arange(count) + uniforms, np.nextafter(np.arange(1.0, count + 1), 0.0))",
            "np.arange(count) + uniforms",
        ),
        (
            "the remainders count what is certain a second time",
            "_inverse(expected - certain, ",
            "_inverse(expected, ",
        ),
        (
            "the effective sample size takes weights to be normalised",
            "float(weights.sum() ** 2 / (weights**2).sum())",
            "float(1 / (weights**2).sum())",
        ),
        (
            "partial resampling gives the resampled the mean of all",
            "weights[others] = log_mean_exp(log_weights[others])",
            "weights[others] = log_mean_exp(log_weights)",
        ),
    ),
    *breaks(
        "inference/smc.py",
        "test_inference.py",
        (
            "resampling forgets the evidence so far",
            "np.full(count, state.log_evidence)",
            "np.zeros(count)",
        ),
        (
            "resampling leaves the particles where they are",
            "tuple(particles[ancestor] for ancestor in ancestors)",
            "tuple(particles)",
        ),
        (
            "a run resamples after its last step",
            "resampled = bool(unfinished) and self._is_due(state)",
            "resampled = self._is_due(state)",
        ),
    ),
    *breaks(
        "inference/checks.py",
        "test_inference.py",
        (
            "every step has the same randomness",
            "spawn_key=(step,))",
            "spawn_key=())",
        ),
    ),
    *breaks(
        "inference/state.py",
        "test_inference.py",
        (
            "the dead are asked about",
            "if not particle.finished and log_weight > -math.inf",
            "if not particle.finished",
        ),
    ),
    *breaks(
        "inference/result.py",
        "test_inference.py",
        (
            "of equal texts the posterior has the last one's weight",
            "total[each] += float(weight)",
            "total[each] = float(weight)",
        ),
    ),
    *breaks(
        "tokens/texts.py",
        "test_texts.py",
        (
            "a text's own U+FFFD reads as the escape of a byte",
            '    if "\\ufffd\\\\x" in text:\n',
            "    if False:\n",
        ),
        (
            "bytes that are not UTF-8 look alike",
            'return f"\\ufffd\\\\x{byte:02x}"',
            'return "\\ufffd"',
        ),
        only="bytes",
    ),
    *breaks(
        "inference/text_model.py",
        "test_inference.py test_text_model.py test_stops.py",
        (
            "a text may end at the last step where it is not complete",
            "masks[at_last] &= end",
            "masks[at_last] = end",
        ),
        (
            "a weight grows by the token's probability, not by the mass of what may follow",
            "found.log_mass.double()",
            "found.logprobs.double()",
        ),
        (
            "texts of different constraint states share the next one",
            "key = (id(state), token_id)",
            "key = (0, token_id)",
        ),
        (
            "the law of tempered rows is not that of the evidence",
            "return sampling.truncate(rows, temperature=self._temperature)",
            "return rows / self._temperature",
        ),
        (
            "a text that nothing ends is finished where the constraint does not accept it",
            "if accepts[id(each.constraint_state)]",
            "if True",
        ),
        (
            "a twist is never taken off again",
            "log_weight=each.log_weight + value - before.log_twist",
            "log_weight=each.log_weight + value",
        ),
    ),
    *breaks(
        "inference/blocking.py",
        "test_blocking.py",
        (
            "a run does not see its caller's context",
            "runner.run(self._main(), context=self.context)",
            "runner.run(self._main())",
        ),
        (
            "an interrupt is raised while the run still ends",
            "        self.ended.wait()\n",
            "        pass\n",
        ),
    ),
    *breaks(
        "tokens/texts.py",
        "test_texts.py",
        (
            "texts that read the same are equal, whatever they are made of",
            "return self._key() == other._key()",
            "return str.__eq__(self, other)",
        ),
    ),
    *breaks(
        "inference/awrs.py",
        "test_awrs.py",
        (
            "one accepted token is enough",
            "while len(accepted) < 2:",
            "while len(accepted) < 1:",
        ),
        (
            "rejected tokens still count in the rates",
            "        self.rate -= weight\n",
            "        pass\n",
        ),
        (
            "rejected tokens are drawn again",
            "        remaining[token_id] = 0.0\n",
            "",
        ),
        (
            "an arrival of a token that was rejected before is waited for",
            "        if left[token_id] == 0:",
            "        if False:",
        ),
    ),
    *breaks(
        "inference/potentials.py",
        "test_text_model.py",
        (
            "plain potentials go on after a cancellation",
            "            stop.set()\n",
            "            pass\n",
        ),
        (
            "what is awaited is asked of the next text",
            "rest, first = distinct[len(answers) :], answers.pop()",
            "first, rest = answers.pop(), distinct[len(answers) :]",
        ),
    ),
    *breaks(
        "inference/programs.py",
        "test_programs.py",
        (
            "a child that runs again observes again what its parent did",
            "        if self._is_live:\n            self._log_weight += number",
            "        if True:\n            self._log_weight += number",
        ),
        (
            "all children go on with the execution of their parent",
            "execution, coroutine = particle.live.pop()",
            "execution, coroutine = particle.live[0]",
        ),
        (
            "particles without weight go on to the next step",
            " or self._log_weight == -math.inf:",
            ":",
        ),
        (
            "a choice is no resampling point",
            "await self._point(asked, due=self._has_weighed)",
            "await self._point(asked, due=False)",
        ),
        (
            "questions that were forgotten are not told of at the end",
            "                raise forgotten\n            if not",
            "                pass\n            if not",
        ),
        (
            "a program may sample in tasks of its own",
            "if asyncio.current_task() is not self._task:",
            "if False:",
        ),
        (
            "a mask's mass is not observed",
            "            self.observe(drawn.log_mass)\n",
            "            pass\n",
        ),
    ),
    *breaks(
        "inference/metropolis.py",
        "test_metropolis.py",
        (
            "lengths do not count in the ratio",
            " + math.log(len(chain.growths) / len(new))",
            "",
        ),
        (
            "what the old suffix had gained does not count",
            "return gained - lost",
            "return gained",
        ),
    ),
    *breaks(
        "inference/diagnostics.py",
        "test_diagnostics.py",
        (
            "chains are not cut in halves",
            "    scores = _halves(_normal_scores(numbers))\n",
            "    scores = _normal_scores(numbers)\n",
        ),
        (
            "chains at one value are perfect",
            "    if (scores == scores[0, 0]).all():\n        return UNKNOWN\n",
            "    if (scores == scores[0, 0]).all():\n        return Diagnosis(numbers.size, 1.0)\n",
        ),
        (
            "differences between chains do not count",
            "return within, (steps - 1) / steps * within + between",
            "return within, within",
        ),
        (
            "lags whose autocorrelation is noise count",
            "pairs[: negative[0] if len(negative) else None]",
            "pairs[:]",
        ),
        (
            "whether chains are at the common values is not looked at",
            "return [(codes == code)",
            "return [(codes < 0)",
        ),
    ),
    *breaks(
        "inference/baselines.py",
        "test_baselines.py",
        (
            "a text that was cut may be one of the constraint",
            "len(text.token_ids) < self._model.max_steps",
            "len(text.token_ids) <= self._model.max_steps",
        ),
        (
            "texts are kept whatever the bound is",
            "threshold <= log_weight - self._bound",
            "threshold <= log_weight",
        ),
        (
            "the evidence of rejection counts the last kept text",
            "(kept - 1) / (drawn - 1)",
            "kept / drawn",
        ),
    ),
    *breaks(
        "constraints/grammars.py",
        "test_constraints.py",
        (
            "a text may end where it is not complete",
            "row[word] = row[word] | end if state.accepting else row[word] & ~end",
            "row[word] = row[word] | end",
        ),
        (
            "advancing a state changes it for those who share it",
            "matcher = self.matcher.deep_copy()",
            "matcher = self.matcher",
        ),
    ),
    *breaks(
        "constraints/matching.py",
        "test_grammars.py",
        (
            "an option of the grammar's text admits one tokenization alone",
            "f'{lark}\\n%llguidance {{\"no_forcing\": true}}'",
            "f'%llguidance {{\"no_forcing\": true}}\\n{lark}'",
        ),
    ),
    *breaks(
        "constraints/grammars.py",
        "test_grammars.py",
        (
            "special tokens in a grammar are not refused",
            'if match["special"]:',
            'if match["special"] == "":',
        ),
    ),
    *breaks(
        "constraints/ebnf.py",
        "test_grammars.py",
        (
            "a hyphen at the end of a class begins a range",
            'if index + 2 < len(letters) and signs[index + 1] == "-":',
            'if index + 1 < len(letters) and signs[index + 1] == "-":',
        ),
        (
            "a literal is one terminal, which takes the longest match",
            "return f\"({' '.join(_regex(letter) for letter in letters)})\" if letters else _NOTHING",
            'return f\'"{"".join(letters)}"\'',
        ),
    ),
    *breaks(
        "constraints/productive.py",
        "test_productive.py",
        (
            "what an optional group holds is not looked at",
            "yield from self._dead_in(item.inside)",
            "pass",
        ),
        (
            "a terminal always matches something",
            "return not self._is_empty(item.terminal)",
            "return True",
        ),
    ),
    *breaks(
        "constraints/schemas.py",
        "test_schemas.py",
        (
            "a schema that refers to itself without end is kept",
            "within[key] = False",
            "pass",
        ),
        (
            "a property by pattern may have a name that is taken",
            "if not _has_names(taken, {pattern: True}):",
            "if False:",
        ),
        (
            "the schema of a pattern that only names match is dropped",
            'properties[name] = {"allOf": [properties.get(name, True), values]}',
            "pass",
        ),
        (
            "multiples are counted from below the bound",
            "math.ceil(low / step)",
            "math.floor(low / step)",
        ),
    ),
    *breaks(
        "constraints/formats.py",
        "test_schemas.py",
        (
            "1900 is a leap year",
            '_LEAP_YEAR = f"(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)"',
            '_LEAP_YEAR = f"(?:[0-9]{{2}}{_BY_FOUR}|[0-9]{{2}}00)"',
        ),
    ),
    *breaks(
        "constraints/string_sets.py",
        "test_string_sets.py",
        (
            "a text that others begin with hides them",
            "            if len(self.texts[first]) == depth:\n                first += 1\n",
            "            if len(self.texts[first]) == depth:\n                continue\n",
        ),
        (
            "one of several tokens of equal bytes is forgotten",
            "mask[spelt[start:here]] = True",
            "mask[spelt[start : min(here, start + 1)]] = True",
        ),
    ),
    *breaks(
        "constraints/predicates.py",
        "test_predicates.py",
        (
            "two who ask at once call the predicate twice",
            "mine = [token_id for token_id in missing if token_id not in self._turns]",
            "mine = missing",
        ),
        (
            "whoever waited for a cancelled check is refused",
            "await asyncio.wait([asyncio.wrap_future(other) for other in others])",
            "await asyncio.wait([asyncio.wrap_future(other) for other in others])\n                break",
        ),
        (
            "a cancelled check goes on in its thread",
            "                    stop.set()",
            "                    pass",
        ),
        (
            "the end of a text is asked about as a prefix",
            "return Text(self._token_ids, self._bytes, finished=True)",
            "return Text(self._token_ids, self._bytes)",
        ),
        (
            "a number passes for an answer",
            "if not isinstance(answer, bool | np.bool_):",
            "if answer is None:",
        ),
    ),
    *breaks(
        "constraints/asking.py",
        "test_predicates.py",
        (
            "after an error the other questions go on",
            "            task.cancel()\n",
            "            pass\n",
        ),
    ),
    *breaks(
        "constraints/products.py",
        "test_products.py",
        (
            "one factor of a product is enough",
            "words = np.bitwise_and(words, words_of(state)[0])",
            "words = np.bitwise_or(words, words_of(state)[0])",
        ),
        (
            "a product may end where one factor may",
            "return all(state.accepting for state in self.factors)",
            "return any(state.accepting for state in self.factors)",
        ),
        (
            "the dear are asked about what the cheap refused",
            "left = [i for i in dict.fromkeys(asked) if words[i // 32] >> (i % 32) & 1]",
            "left = list(dict.fromkeys(asked))",
        ),
        (
            "vocabularies of one size pass for one",
            "or any(not known[0].same(tokens) for tokens in known[1:])",
            "",
        ),
    ),
    *breaks(
        "constraints/potentials.py",
        "test_products.py test_potentials.py",
        (
            "a finished text need not be complete",
            "-math.inf if text.finished and not state.accepting else 0.0",
            "0.0",
        ),
        (
            "the states of texts are not kept",
            "self._kept[token_ids] = state",
            "pass",
        ),
    ),
    *breaks(
        "constraints/masking.py",
        "test_products.py",
        (
            "a checked state that is there twice is asked twice",
            "checked.setdefault(id(state), (state, []))[1].append(row)",
            "checked[row] = (state, [row])",
        ),
        (
            "a mask of a checked state is what nothing cheap rules out",
            "mask[token_ids] = answers",
            "mask[token_ids] = True",
        ),
    ),
    *breaks(
        "engines/stepping.py",
        "test_stepping.py test_exact.py test_numbers.py",
        (
            "the least parameters of samples are 0 in a step",
            "    return torch.tensor(numbers, dtype=torch.float64)",
            "    return torch.tensor(numbers)",
        ),
        (
            "samples stay before the rows that came after them",
            "            del self._in_progress[progress.request]\n"
            "            if progress.request not in done:\n"
            "                self._in_progress[progress.request] = progress\n",
            "            if progress.request in done:\n"
            "                del self._in_progress[progress.request]\n",
        ),
        (
            "one poisoned row fails its whole step",
            "sound = ~(logits.isnan() | (logits == torch.inf)).any(-1) &",
            "sound = ~(logits.isnan() | (logits == torch.inf)).any() &",
        ),
        (
            "the stop token is part of the sample",
            "            if not stopped:\n                progress.drawn.append(token)\n",
            "            progress.drawn.append(token)\n",
        ),
        (
            "an adapter goes while a request needs it",
            "[each for each in self._leaving if each not in bound]",
            "list(self._leaving)",
        ),
        (
            "a failed step's requests go on",
            "        lost = len(self._in_progress)\n        self._in_progress.clear()\n",
            "        lost = len(self._in_progress)\n",
        ),
    ),
    *breaks(
        "engines/exact.py",
        "test_exact.py",
        (
            "short contexts are filled up at their end",
            "return (0,) * (order - len(tail)) + tail",
            "return tail + (0,) * (order - len(tail))",
        ),
        (
            "rows are the table's own memory",
            "return self._table[_key(token_ids, self.order)].clone()",
            "return self._table[_key(token_ids, self.order)]",
        ),
        (
            "texts that were cut count as ended",
            "                if unfinished:\n                    yield text, logprob\n",
            "                yield text, logprob\n",
        ),
    ),
    *breaks(
        "engines/residency.py",
        "test_residency.py",
        (
            "a guess may be another adapter's sequence",
            "            and resident.adapter == adapter\n        )",
            "        )",
        ),
        (
            "a sequence that grew is still found as it was",
            "            if resident.digest is not None:\n                self._undigest(resident)\n",
            "",
        ),
        (
            "pieces of a sequence that went stay in the index",
            "            del names[name]\n",
            "",
        ),
        (
            "a context shares all of its tokens, the one to compute too",
            "(best[0], min(best[1], most))",
            "best",
        ),
        (
            "any sequence that shares a piece is the nearest",
            "if best is None or length > best[1]:",
            "if best is None:",
        ),
        (
            "a sequence that grew is cut into pieces from its beginning again",
            "                len(pieces) * PIECE_BYTES, len(context)",
            "                0, len(context)",
        ),
        only="TestResidents or grew",
    ),
    *breaks(
        "engines/vllm/self_check.py",
        "test_vllm_self_test.py",
        (
            "half a nat passes, whatever the network computes with",
            "noise = 64 * max(rounding, TF32)",
            "noise = 0.5",
        ),
        (
            "half of what lies between two rows passes",
            "if moved > noise * max(1.0, apart / 4):",
            "if moved > max(noise, apart / 2):",
        ),
        (
            "no block is ever full",
            "length = max(20, min(block_size + 4, engine.max_model_len - 5))",
            "length = 20",
        ),
    ),
    *breaks(
        "engines/vllm/capture.py",
        "test_capture.py",
        (
            "rows are matched by the order in which requests came",
            "[self._tickets[index] for index in indices],",
            "list(self._tickets.values()),",
        ),
        (
            "of two requests that swap places one is lost",
            "        if replaced is not None and direction == MoveDirectionality.SWAP:\n"
            "            places[source] = replaced\n",
            "",
        ),
        (
            "a slot's next request has the last one's ticket",
            "            self._tickets.pop(req_idx, None)\n            return False",
            "            return False",
        ),
        (
            "a slot's number is taken for its place in the step",
            "rows.append(row)",
            "rows.append(slot)",
        ),
        (
            "rows that are not finite are answers",
            "taken.append(None if position in not_finite[id(rows)] else rows[position])",
            "taken.append(rows[position])",
        ),
        (
            "only a step's first row is looked at for what is not finite",
            "Leaving(self._first.sum())",
            "Leaving(self._first[0])",
        ),
        (
            "rows that were taken are kept",
            "rows, position = self._rows.pop(ticket)",
            "rows, position = self._rows[ticket]",
        ),
        (
            "rows are looked for where they were in the step before",
            "            return\n        self._layout = None\n",
            "            return\n",
        ),
        (
            "of a prompt's parts the first one's row stays",
            "self._rows[ticket] = (rows, position)",
            "self._rows.setdefault(ticket, (rows, position))",
        ),
        (
            "half-precision logits give half-precision rows",
            "return logits.log_softmax(dim=-1, dtype=torch.float32)",
            "return logits.log_softmax(dim=-1)",
        ),
    ),
    *breaks(
        "engines/vllm/open_requests.py",
        "test_residency.py",
        (
            "a held step is run although its sequences have moved on",
            "fits = len(tokens) == len(by_name) and positions == held.positions",
            "fits = len(tokens) == len(by_name)",
        ),
        (
            "a sequence that vLLM has forgotten is thought to be resident",
            "        for name in gone:\n            self._drop(name)\n",
            "",
        ),
        only="population or between_two_steps or cancelled_extension",
    ),
    *breaks(
        "engines/vllm/open_scheduler.py",
        "test_residency.py",
        (
            "the copy of a shared block is forgotten",
            "copied=donated[full].block_id if length % self.block_size else None,",
            "copied=None,",
        ),
        (
            "a fork's blocks are not counted as shared",
            "        pool.touch(kept)\n",
            "",
        ),
        (
            "an evicted sequence is thought to be resident",
            "        self._evicted.append(request_id)\n",
            "",
        ),
        only="30-4-4 or population",
    ),
    *breaks(
        "engines/vllm/open_scheduler.py",
        "test_residency.py",
        (
            "parked requests are not evicted for what waits",
            "    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:\n"
            "        if self.parked:\n            self._make_room()\n",
            "    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:\n",
        ),
        (
            "more slots are taken than the runner has",
            "slots = held + len(waiting) - self._max_held",
            "slots = 0",
        ),
        only="slot",
    ),
    *breaks(
        "engines/vllm/open_scheduler.py",
        "test_residency.py",
        (
            "a fork takes the seat of another adapter's sequence",
            "            or request.lora_request != donor.lora_request\n",
            "",
        ),
        (
            "a step has more adapters than there is room for",
            "                if len(wanted) > self.lora_config.max_loras:\n"
            "                    continue\n",
            "",
        ),
        only="adapters",
    ),
    *breaks(
        "engines/vllm/engine.py",
        "test_vllm.py",
        (
            "the stop token of vLLM's samples is returned",
            "result = tuple(token_ids[:-1] if stopped else token_ids)",
            "result = tuple(token_ids)",
        ),
        (
            "samples take every slot there is",
            "self._max_samples = self._max_num_seqs - max(1, self._max_num_seqs // 8)",
            "self._max_samples = self._max_num_seqs",
        ),
        only="stop_token or every_slot",
    ),
    *breaks(
        "testing/bets.py",
        "test_laws.py",
        (
            "too small a mean is never found",
            "on_larger_mean(highest - values, highest - mean",
            "on_larger_mean(highest - values, highest",
        ),
        (
            "rounding is a bias",
            "highest - mean + slack)",
            "highest - mean)",
        ),
        (
            "without a bound twice the largest value seen is one",
            "    if highest == math.inf:\n        return spread(larger, -math.inf)\n",
            "    if highest == math.inf:\n        highest = 2 * max(float(values.max()), mean)\n",
        ),
        (
            "beside a sure sample rare ones are not judged",
            "    others[likeliest] = expected[torch.arange(len(expected)) != likeliest].sum()\n",
            "",
        ),
        only="found or constant or bound",
    ),
    *breaks(
        "testing/laws.py",
        "test_laws.py",
        (
            "an impossible sample is left out",
            "return [sample for sample in samples if sample not in law]",
            "return []",
        ),
        (
            "only the evidence is judged",
            "bets.spread(*capitals[1:]) if capitals[1:] else 0.0",
            "0.0",
        ),
        only="found or judged",
    ),
    *breaks(
        "testing/enumeration.py",
        "test_enumeration.py",
        (
            "a constrained text may be cut",
            "            return [frozenset([eos] if end else []) for end in ends]\n",
            "",
        ),
        (
            "rows are tempered and not normalised again",
            "row = row.log_softmax(-1)",
            "row = row / self._temperature",
        ),
        (
            "tokenizations of one text are not added up",
            "by_bytes[text.bytes] += probability",
            "by_bytes[text.bytes] = probability",
        ),
    ),
    *breaks(
        "interop/genlm.py",
        "test_genlm.py",
        (
            "the rows of padded matrices are not normalised",
            "rows[..., :missing].log_softmax(dim=-1)",
            "rows[..., :missing]",
        ),
        (
            "genlm's adapters are not heard in batches",
            "rows = await self._lm.batch_next_token_logprobs(token_ids_list, adapter=lora_name)",
            "rows = await self._lm.batch_next_token_logprobs(token_ids_list)",
        ),
        (
            "genlm's end tokens do not end samples",
            "stop_token_ids=eos_token_ids,",
            "",
        ),
        only="not example and not process",
    ),
    *breaks(
        "interop/foreign.py",
        "test_genlm.py",
        (
            "the environment that genlm-backend edits stays edited",
            "        os.environ.update(before)\n",
            "",
        ),
        (
            "what genlm-backend adds to the environment stays",
            "            del os.environ[name]\n",
            "            pass\n",
        ),
        only="process",
    ),
    *breaks(
        "inference/display/genealogy.py",
        "test_genealogy.py",
        (
            "the legend stays in one row and runs out of the picture",
            "if x > LEGEND_LEFT and x + mark.width > wide:",
            "if x > LEGEND_LEFT and x + mark.width > 10 * wide:",
        ),
        (
            "the picture is narrower than an entry of its legend",
            "wide = max(columns.end + RIGHT, LEGEND_LEFT + max(entry.width for entry in marks))",
            "wide = columns.end + RIGHT",
        ),
        only="legend",
    ),
    *breaks(
        "engines/vllm/process.py",
        "test_vllm_process.py",
        (
            "memory is bound, and told of, where there is one node for all of it",
            "setattr(operators, BIND, lambda nodes: None)",
            "setattr(operators, BIND, bind)",
        ),
        (
            "memory is never bound again",
            "        setattr(operators, BIND, bind)\n\n\ndef _has",
            "        pass\n\n\ndef _has",
        ),
        only="memory",
    ),
    *breaks(
        "engines/vllm/process.py",
        "test_vllm_process.py",
        (
            "a demand for the runner V2 keeps vLLM from opening on a CPU",
            "os.environ.pop(V2, None)",
            "None",
        ),
        (
            "a demand for the runner V2 is forgotten",
            "            os.environ[V2] = demanded\n",
            "            pass\n",
        ),
        (
            "vLLM trips over numba",
            'object.__getattribute__(value, "__dict__")',
            "value.__dict__",
        ),
    ),
)
