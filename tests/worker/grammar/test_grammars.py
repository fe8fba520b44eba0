"""Grammars together with every other feature of a step: the tokens do not depend on the rest of the batch or on the execution mode."""

import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from tests.worker.grammar.random_schemas import schema
from tests.worker.grammar.serving import Answer, Ask, Model, Serving

from fairlead_worker.grammar.checker import check
from fairlead_worker.grammar.compiler import Compiler, GrammarError, Matcher
from fairlead_worker.grammar.constraint import Constraint, Kind, ReasoningMarkers
from fairlead_worker.ipc.messages import GRAMMAR_WAITED
from fairlead_worker.sampling.grammars import Grammars
from fairlead_worker.sampling.masks import Masks
from fairlead_worker.scheduler.plan import Row, StepPlan

LIST = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 12, "maxItems": 12}
LONG = [5 + i % 900 for i in range(150)]


@pytest.fixture(scope="module")
def asks(model: Model) -> list[Ask]:
    """Requests with and without grammars, greedy and sampled, with short and long prompts."""
    grammars = [model.grammar("json", schema(seed)) for seed in range(6)] + [model.grammar("json", LIST), ""]
    return [
        Ask(grammar, LONG[: 10 + 20 * seed], max_tokens=60, temperature=seed % 2, seed=seed, more={"logprobs": 1} if seed % 3 == 0 else {})
        for seed, grammar in enumerate(grammars)
    ]


@pytest.fixture(scope="module")
def alone(model: Model, asks: list[Ask]) -> list[Answer]:
    """The answer of each request when it runs alone."""
    return [Serving(model).serve([ask])[0] for ask in asks]


def same(answers: list[Answer], expected: list[Answer]) -> None:
    assert [(a.tokens, a.finish, a.stop_token, a.error) for a in answers] == [(a.tokens, a.finish, a.stop_token, a.error) for a in expected]


def test_together_as_alone(model: Model, asks: list[Ask], alone: list[Answer]) -> None:
    same(Serving(model).serve(asks), alone)


@pytest.mark.parametrize("settings", [{"chunked_prefill_size": 32}, {"chunked_prefill_size": 32, "enable_mixed_chunk": False}])
def test_prompts_in_chunks(model: Model, asks: list[Ask], alone: list[Answer], settings: dict[str, object]) -> None:
    same(Serving(model, **settings).serve(asks), alone)


@pytest.mark.parametrize("settings", [{}, {"chunked_prefill_size": 32}])
def test_steps_launched_ahead(model: Model, asks: list[Ask], alone: list[Answer], settings: dict[str, object]) -> None:
    """Masks are filled while their forward pass runs. A late mask invalidates the row of the step launched ahead."""
    same(Serving(model, overlap=True, **settings).serve(asks), alone)


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_drafts_change_nothing(model: Model, asks: list[Ask], alone: list[Answer], method: str) -> None:
    draft = model.loaded if method == "draft" else None  # it drafts well for greedy sampling without masks
    serving = Serving(model, draft=draft, speculative_method=method, speculative_num_tokens=4, speculative_ngram_min=1)
    same(serving.serve(asks), alone)
    drafts = serving.scheduler.load().drafts
    assert drafts is not None and drafts.tokens > 0, "nothing was drafted: nothing was tried"


def test_drafts_are_accepted_within_a_grammar(model: Model) -> None:
    repeated = model.grammar("regex", "(abc){40}")
    plain, quick = Serving(model), Serving(model, speculative_method="ngram", speculative_num_tokens=4, speculative_ngram_min=1)
    same(quick.serve([Ask(repeated, seed=1)]), plain.serve([Ask(repeated, seed=1)]))
    drafts = quick.scheduler.load().drafts
    assert drafts is not None and drafts.accepted > 0


def test_a_retracted_request_goes_on_where_it_was(model: Model, asks: list[Ask], alone: list[Answer]) -> None:
    """Which request runs out of pages depends on when masks arrive. So the test preempts every decode now and then."""
    serving = Serving(model)
    scheduler, plan = serving.scheduler, serving.scheduler.plan

    def short_of_pages() -> StepPlan:
        if serving.steps % 10 == 9:
            for victim in list(scheduler.batch.requests):
                scheduler.preempt(victim)
                scheduler.waiting.add(victim, lost_pages=True)
        return plan()

    scheduler.plan = short_of_pages  # type: ignore[method-assign]
    same(serving.serve(asks), alone)
    assert scheduler.load().preemptions > len(asks)


def test_logprobs_are_the_models_own(asks: list[Ask], alone: list[Answer]) -> None:
    """Log-probabilities are of the model's own distribution, so the most likely token may be forbidden by the grammar."""
    for ask, answer in zip(asks, alone, strict=True):
        assert len(answer.logprobs) == (len(answer.tokens) if "logprobs" in ask.more else 0)
    assert any(each.top_logprobs[0] > each.chosen for answer in alone for each in answer.logprobs)


def test_prompt_logprobs_beside_a_grammar(model: Model) -> None:
    choice = model.grammar("choice", ["left", "right"])
    (plain,) = Serving(model).serve([Ask(choice, LONG[:40])])
    (scored,) = Serving(model).serve([Ask(choice, LONG[:40], more={"prompt_logprobs": 1})])
    same([scored], [plain])


def test_the_end_of_a_grammar_is_a_stop(model: Model) -> None:
    serving = Serving(model)
    answers = serving.serve(
        [
            Ask(model.grammar("choice", ["left", "right"])),
            Ask(model.grammar("choice", ["left", "right"]), more={"ignore_eos": True}),
            Ask(model.grammar("choice", ["left", "right"]), more={"min_tokens": 50}),
            Ask(model.grammar("json", LIST), max_tokens=5),
        ]
    )
    assert [answer.finish for answer in answers] == ["stop", "stop", "stop", "length"]
    assert all(serving.text(answer) in ("left", "right") for answer in answers[:3])
    assert len(answers[3].tokens) == 5


def test_complete_at_the_last_token_is_a_stop(model: Model) -> None:
    abc = model.grammar("regex", "a{8}")
    (whole,) = Serving(model).serve([Ask(abc)])
    (cut,) = Serving(model).serve([Ask(abc, max_tokens=len(whole.tokens))])
    assert (whole.finish, cut.finish) == ("stop", "stop")
    assert cut.tokens == whole.tokens


def test_where_the_text_may_go_on_its_end_is_the_models(model: Model) -> None:
    """eos is allowed where the grammar is complete, but not before min_tokens, and never with ignore_eos."""
    digits = model.grammar("regex", "[0-9]+")
    eos = model.loaded.eos_token_ids[0]
    free = {"logit_bias": ((eos, 100.0),)}
    ended, later, never = Serving(model).serve(
        [
            Ask(digits, more=free),
            Ask(digits, max_tokens=12, more=free | {"min_tokens": 8}),
            Ask(digits, max_tokens=12, more=free | {"ignore_eos": True}),
        ]
    )
    assert (ended.finish, ended.stop_token, len(ended.tokens)) == ("stop", eos, 2)
    assert (later.finish, later.stop_token, len(later.tokens)) == ("stop", eos, 9), "eight tokens, then the eos"
    assert (never.finish, len(never.tokens)) == ("length", 12)


def test_stop_token_ids_end_what_is_complete(model: Model) -> None:
    digits, end = model.grammar("regex", "[0-9]+"), 900
    (answer,) = Serving(model).serve([Ask(digits, more={"stop_token_ids": (end,), "logit_bias": ((end, 100.0),), "ignore_eos": True})])
    assert (answer.finish, answer.stop_token) == ("stop", end)


def test_nothing_left_to_choose_is_that_requests_error(model: Model) -> None:
    digits = model.grammar("regex", "[0-9]+x")
    letters = tuple(model.tokens("abc"))
    refused, fine = Serving(model).serve([Ask(digits, more={"allowed_token_ids": letters}), Ask("", max_tokens=5)])
    assert refused.finish == "error"
    assert "no token can be chosen" in refused.error
    assert (fine.finish, len(fine.tokens)) == ("length", 5)


def test_a_grammar_that_does_not_compile_here_is_refused(model: Model) -> None:
    refused, fine = Serving(model).serve([Ask("start: nowhere"), Ask("", max_tokens=5)])
    assert refused.finish == "error"
    assert "nowhere" in refused.error
    assert len(fine.tokens) == 5


class Slow(Compiler):
    """A compiler whose masks of one grammar wait for the test."""

    def __init__(self, compiler: Compiler) -> None:
        self.__dict__ = compiler.__dict__
        self.gate = threading.Semaphore(0)

    def fill(self, matcher: Matcher, mask: np.ndarray) -> None:
        self.gate.acquire()
        super().fill(matcher, mask)


def test_a_late_mask_delays_no_other_request(model: Model) -> None:
    """The plain request gets a token in each step. The other one gets the same tokens as always, once its masks arrive."""
    choice = model.grammar("choice", ["left", "right"])
    expected = Serving(model).serve([Ask(choice), Ask("", max_tokens=30)])
    slow = Slow(model.compiler)
    serving = Serving(model, grammars=Grammars(slow))
    plain: list[int] = []
    execute = serving.runner.execute

    def counted(plan):  # type: ignore[no-untyped-def]
        result = execute(plan)
        plain.append(sum(map(len, result.tokens)))
        if len(plain) == 30:
            slow.gate.release(100)  # the plain request has ended
        return result

    serving.runner.execute = counted  # type: ignore[method-assign]
    same(serving.serve([Ask(choice), Ask("", max_tokens=30)]), expected)
    assert plain[:30] == [1] * 30


@pytest.mark.parametrize("overlap", [False, True])
def test_a_late_mask_delays_no_part_of_a_prompt(model: Model, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another prompt is computed in parts, the late row is the only one that samples."""
    monkeypatch.setattr("fairlead_worker.sampling.grammars.ALONE_SECONDS", 1000.0)
    choice, slow = model.grammar("choice", ["left", "right"]), Slow(model.compiler)
    grammars = Grammars(slow)
    serving = Serving(model, grammars=grammars, overlap=overlap, chunked_prefill_size=32)
    assert grammars.compile(choice).result() == "", "so that the first step has both"
    masks, chunks = grammars.masks, []

    def counted(rows: list[Row], has_others: bool, is_computed: Callable[[], bool]) -> Masks:
        chunks.append(has_others)
        if not has_others:
            slow.gate.release(100)  # the prompt is computed
        return masks(rows, has_others, is_computed)

    grammars.masks = counted  # type: ignore[method-assign]
    late, plain = serving.serve([Ask(choice), Ask("", prompt=range(5, 155), max_tokens=1)])
    assert chunks[:4] == [True] * 4 and serving.text(late) in ("left", "right") and len(plain.tokens) == 1


def test_a_grammar_begins_with_the_tokens_that_were_known(model: Model) -> None:
    """The grammar must not see a token that is unread when a busy thread reaches it."""
    asks = [Ask(model.grammar("choice", words)) for words in (["left", "right"], ["up", "down"])]
    expected = Serving(model).serve(asks)
    slow = Slow(model.compiler)
    grammars = Grammars(slow, threads=1)
    serving = Serving(model, grammars=grammars, overlap=True)
    assert all(grammars.compile(ask.grammar).result() == "" for ask in asks), "so that the first step has both"
    assert serving.ahead is not None
    advance_unread = serving.ahead.advance_unread
    stood_in: list[bool] = []

    def assumed(plan: StepPlan, awaited: list[Row]) -> None:
        advance_unread(plan, awaited)
        if not stood_in:
            stood_in.extend(row.request.unread == 1 for row in plan.rows)
            slow.gate.release(100)
            with grammars._filled:  # by then the one thread has started both
                assert grammars._filled.wait_for(lambda: not any(each.filling for each in grammars._followed.values()), 60)

    serving.ahead.advance_unread = assumed  # type: ignore[method-assign]
    same(serving.serve(asks), expected)
    assert stood_in == [True, True]


class Costly(Compiler):
    """A compiler each of whose masks takes some CPU time."""

    def __init__(self, compiler: Compiler) -> None:
        self.__dict__ = compiler.__dict__

    def fill(self, matcher: Matcher, mask: np.ndarray) -> None:
        began = time.thread_time()
        while time.thread_time() - began < 0.005:
            pass
        super().fill(matcher, mask)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_last_output_tells_the_cpu_time_of_the_masks(model: Model, overlap: bool) -> None:
    serving = Serving(model, grammars=Grammars(Costly(model.compiler)), overlap=overlap)
    grammar, plain = serving.serve([Ask(model.grammar("choice", ["left", "right"])), Ask("", max_tokens=3)])
    assert 0.005 * len(grammar.tokens) <= grammar.mask_seconds < 0.015 * (len(grammar.tokens) + 2)
    assert plain.mask_seconds == 0


def test_no_mask_is_late_while_the_device_computes(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate opens at the third look at a pass that ends only with the mask: each step has a token of the request."""
    monkeypatch.setattr("fairlead_worker.sampling.grammars.ALONE_SECONDS", 0.0)
    choice, slow = model.grammar("choice", ["left", "right"]), Slow(model.compiler)
    grammars, looks = Grammars(slow), 0

    def computes(device: torch.device) -> Callable[[], bool]:
        def is_computed() -> bool:
            nonlocal looks
            looks += 1
            if looks % 3 == 0:
                slow.gate.release()
            return False

        return is_computed

    monkeypatch.setattr("fairlead_worker.execution.overlap.watch", computes)
    serving = Serving(model, grammars=grammars, overlap=True)
    serving.scheduler.batch.retry = None  # type: ignore[method-assign,assignment]
    (answer,) = serving.serve([Ask(choice)])
    assert serving.text(answer) in ("left", "right") and looks >= 3
    slow.gate.release(100)


def test_with_recurrent_states_a_step_waits_for_its_masks(model: Model) -> None:
    """No token is computed twice: the state has it already. The gate opens only once the step waits."""
    choice = model.grammar("choice", ["left", "right"])
    expected = Serving(model).serve([Ask(choice), Ask("", max_tokens=30)])
    slow = Slow(model.compiler)
    grammars = Grammars(slow, waits=True)
    wait = grammars._filled.wait_for

    def wait_for(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        threading.Timer(0.02, slow.gate.release).start()
        return wait(predicate, timeout)

    grammars._filled.wait_for = wait_for  # type: ignore[method-assign]
    serving = Serving(model, grammars=grammars, overlap=True)
    serving.scheduler.batch.retry = None  # type: ignore[method-assign,assignment]
    same(serving.serve([Ask(choice), Ask("", max_tokens=30)]), expected)
    slow.gate.release(100)


@pytest.mark.parametrize("waits", [False, True])
def test_a_mask_that_never_comes_ends_its_request(model: Model, waits: bool) -> None:
    slow = Slow(model.compiler)
    serving = Serving(model, grammars=Grammars(slow, timeout=0.05, waits=waits))
    (answer,) = serving.serve([Ask(model.grammar("choice", ["left", "right"]))])
    slow.gate.release(100)
    assert answer.finish == "error" and answer.mask_seconds >= 0.05
    assert "--limits grammar_timeout" in answer.error


class SlowAtFirst(Compiler):
    """A compiler whose first masks wait for the test. All others are immediate."""

    def __init__(self, compiler: Compiler, slow: int) -> None:
        self.__dict__ = compiler.__dict__ | {"slow": slow, "gate": threading.Semaphore(0)}

    def fill(self, matcher: Matcher, mask: np.ndarray) -> None:
        self.slow -= 1
        if self.slow >= 0:
            self.gate.acquire()
        super().fill(matcher, mask)


def test_slow_grammars_end_no_request_whose_masks_are_quick(model: Model) -> None:
    """The time limit of a mask begins when a thread starts it. The third waits for both threads as long as the first two may take."""
    slow = SlowAtFirst(model.compiler, 2)
    choice = model.grammar("choice", ["left", "right"])
    serving = Serving(model, grammars=Grammars(slow, threads=2, timeout=0.2))
    assert serving.grammars.compile(choice).result() == "", "so that the first step has all three"
    *ended, quick = serving.serve([Ask(choice), Ask(choice), Ask(choice, max_tokens=60)])
    slow.gate.release(2)
    assert all(answer.finish == "error" and "--limits grammar_timeout" in answer.error for answer in ended)
    assert quick.finish == "stop" and serving.text(quick) in ("left", "right")


def test_masks_that_all_hang_end_their_requests_and_nothing_waits_for_ever(model: Model) -> None:
    """One thread and one replacement: the others end when those before them would have reached their limit."""
    slow = Slow(model.compiler)
    choice = model.grammar("choice", ["left", "right"])
    serving = Serving(model, grammars=Grammars(slow, threads=1, timeout=0.05))
    assert serving.grammars.compile(choice).result() == ""
    answers = serving.serve([Ask(choice)] * 4)
    slow.gate.release(100)
    assert [answer.finish for answer in answers] == ["error"] * 4
    waited = [answer.error.startswith(GRAMMAR_WAITED) for answer in answers]
    assert waited == [False, False, True, True], [answer.error for answer in answers]


def test_an_abort_while_its_mask_is_late_or_its_grammar_compiles(model: Model) -> None:
    slow = Slow(model.compiler)
    serving = Serving(model, grammars=Grammars(slow))
    serving.runner.grammars.compile(model.grammar("json", LIST)).result()
    assert serving.gate.abort("unknown") is None
    stop = threading.Event()

    def abort_soon(plan, execute=serving.runner.execute):  # type: ignore[no-untyped-def]
        result = execute(plan)
        if not stop.is_set():
            stop.set()
            assert serving.scheduler.abort("0") is not None
        return result

    serving.runner.execute = abort_soon  # type: ignore[method-assign]
    answers = serving.serve([Ask(model.grammar("json", LIST)), Ask("", max_tokens=3)])
    slow.gate.release(100)
    assert len(answers[1].tokens) == 3
    assert serving.scheduler.cache.pool.free + serving.scheduler.cache.pool.cached == 512


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("grammar", "7", "Expected ::="),
        ("grammar", "x", "Expected ::="),
        ("grammar", 'root ::= "a', "end of input"),
        ("grammar", "start: nowhere", "nowhere"),
        ("regex", "(", "regex"),
        ("json", '{"type": 7}', "type"),
        ("json", '{"$ref": "#"}', "refers to itself"),
        ("grammar", "root ::= root", "refers to itself"),
        ("structural_tag", "{}", "structures"),
        ("structural_tag", '{"structures": [7], "triggers": ["a"]}', "get"),
    ],
)
def test_an_invalid_grammar_is_reported(model: Model, kind: Kind, text: str, says: str) -> None:
    """An invalid grammar does not end the checker process, which the next request would wait for."""
    assert says in check(model.compiler, Constraint(kind, text, "test")).error


def test_grammars_are_kept_and_forgotten(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(model.compiler, entries=2)
    texts = [model.grammar("choice", [f"word{n}"]) for n in range(3)]
    serving = Serving(model, grammars=grammars)
    answers = serving.serve([Ask(text) for text in texts])  # more at the same time than the cache keeps
    assert [serving.text(answer) for answer in answers] == ["word0", "word1", "word2"]
    compiled: list[str] = []
    matcher = model.compiler.matcher
    monkeypatch.setattr(model.compiler, "matcher", lambda text: compiled.append(text) or matcher(text))

    def compile(*numbers: int) -> None:
        assert {grammars.compile(texts[number]).result(60) for number in numbers} == {""}

    compile(0, 1, 2)  # whichever grammars the requests left in the cache, these are the latest now
    compiled.clear()
    compile(1, 2, 0, 2, 1)
    assert compiled == [texts[0], texts[1]], "of the two kept grammars, the most recently used one stays"


def test_more_grammars_at_once_than_are_kept(model: Model) -> None:
    """They arrive over several steps and are compiled again while others are being filled. No request waits forever."""
    serving = Serving(model, grammars=Grammars(model.compiler, entries=1, threads=1), chunked_prefill_size=16)
    asks = [Ask(model.grammar("choice", [f"word{n}"]), LONG[n : n + 14]) for n in range(8)]
    assert [serving.text(answer) for answer in serving.serve(asks)] == [f"word{n}" for n in range(8)]


def test_free_text_with_tags(model: Model) -> None:
    """After a trigger the tag's own schema applies; outside, any text is allowed."""
    tag = {"begin": "<f=a>", "schema": {"type": "object", "properties": {"n": {"const": 1}}, "required": ["n"]}, "end": "</f>"}
    grammar = model.grammar("structural_tag", {"type": "structural_tag", "structures": [tag], "triggers": ["<f="]})
    matcher = model.compiler.matcher(grammar)
    good = model.tokens('so <f=a>{"n": 1}</f> and on')
    assert matcher.try_consume_tokens(good) == len(good)
    assert matcher.is_accepting()
    bad = model.compiler.matcher(grammar)
    assert bad.try_consume_tokens(model.tokens("so <f=b>")) < len(model.tokens("so <f=b>"))


def test_calls_and_reasoning_before_them(model: Model) -> None:
    """Each tool has its own schema with its own references. Text before the end marker is free."""
    named = {"$defs": {"n": {"const": 1}}, "type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    tools = [{"name": "a", "schema": named}, {"name": "b", "schema": {"type": "object"}}]
    text = msgspec.json.encode({"tools": tools, "one": False}).decode()

    def accepts(reasoning: ReasoningMarkers | None, answer: str) -> bool:
        verdict = check(model.compiler, Constraint("calls", text, "tools", None, reasoning, ("a", "b")))
        assert not verdict.error, verdict.error
        matcher, tokens = model.compiler.matcher(verdict.grammar), model.tokens(answer)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    both = '[{"name": "a", "parameters": {"n": 1}}, {"name": "b", "parameters": {}}]'
    assert accepts(None, both) and not accepts(None, both.replace("1", "2")) and not accepts(None, f"So: {both}")
    opened, maybe = ReasoningMarkers("<t>", "</t>", True), ReasoningMarkers("<t>", "</t>", False)
    assert accepts(opened, f"any {{ text\n</t>\n\n{both}") and not accepts(opened, both)
    assert accepts(maybe, f"<t>text</t>{both}") and accepts(maybe, both) and not accepts(maybe, f"text</t>{both}")
    special = ReasoningMarkers("<|im_start|>t", "<|im_start|>so", False, "<|im_start|>x")
    assert accepts(special, f"<|im_start|>t any<|im_start|>so{both}") and accepts(special, f"<|im_start|>x{both}")
    assert not accepts(special, f"<|im_start|>t any{both}") and not accepts(special, both)


def test_text_that_spells_a_special_token_is_text(model: Model) -> None:
    """Forced text would be tokenized as a whole, with the special token for its name, which no text matches."""
    serving = Serving(model)
    grammars = [model.grammar("regex", r"<\|im_start\|>[ab]{1,3}"), model.grammar("choice", ["<|im_start|>a", "<|im_start|>b"])]
    assert all(model.tokenizer.decode(answer.tokens).startswith("<|im_start|>") for answer in serving.serve(list(map(Ask, grammars))))


def test_a_model_without_such_a_tokenizer_says_so(model: Model) -> None:
    with pytest.raises(GrammarError, match="tokenizer"):
        Compiler("{}", 100, ())
