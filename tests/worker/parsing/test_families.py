"""Parser selection for each model. A parser sees the special tokens that it needs, and other special tokens stay hidden."""

import json
import random
from array import array

import pytest
from tests.worker.parsing.samples import SAMPLES, SCHEMAS, Sample
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fairlead_common.prompts.encoder import PromptEncoder, PromptFormat
from fairlead_worker.api.generation.choice import Choice, OutputDelta
from fairlead_worker.api.generation.sampling import read_options
from fairlead_worker.api.output.parsers import OutputParsers
from fairlead_worker.api.output.tool_choice import Function, ToolUse
from fairlead_worker.api.schema import ChatRequest
from fairlead_worker.ipc.messages import Output
from fairlead_worker.parsing.events import gather
from fairlead_worker.parsing.families import ModelParsers, ParserOptions, select_parsers
from fairlead_worker.parsing.stage import Tools

SPECIAL = [
    *(
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|constrain|>",
        "<|return|>",
        "<|call|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
    ),
    *(
        "[THINK]",
        "[/THINK]",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<|python_tag|>", "<|tool_call|>", "<|other|>", "<|tool_call_begin|>"),
]


@pytest.mark.parametrize(
    ("template", "calls", "thinking"),
    [
        ("{{ messages }}", "", ""),
        ('<tool_call>\n{"name": <function-name>', "hermes", ""),
        ("<tool_call> </think>", "hermes", "think"),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder", ""),
        ("<｜tool▁calls▁begin｜> <think>", "deepseek_v3", "think"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral", ""),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ('Respond in the format {"name": function name, "parameters": dictionary', "llama3_json", ""),
        ("[func_name1(params_name1=params_value1)]", "pythonic", ""),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
        ("<tool_call>{name}\n<arg_key>", "glm45", ""),
    ],
)
def test_the_chat_template_selects_the_parsers(template: str, calls: str, thinking: str) -> None:
    model_parsers, why = select_parsers("auto", "auto", (template, ""))
    assert (model_parsers.tool_parser, model_parsers.reasoning_parser) == (calls, thinking)
    assert (calls or "none") in why and "from the chat template" in why


def test_flags_stand_above_the_template() -> None:
    gpt_oss = "<|start|>assistant<|channel|>analysis<|message|>"
    assert select_parsers("none", "none", ("<tool_call> <think>",))[0] == ModelParsers()
    assert select_parsers("hermes", "auto", (gpt_oss,))[0] == ModelParsers("hermes")
    assert select_parsers("none", "auto", (gpt_oss,))[0] == ModelParsers("", "harmony")
    assert select_parsers("harmony", "auto", ())[0] == ModelParsers("harmony", "harmony")
    with pytest.raises(ValueError, match="do not go together"):
        select_parsers("harmony", "think", ())


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    """A byte-level tokenizer with special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    text = tokenizer.to_str()
    return PromptEncoder(
        PromptFormat(tokenizer_json=text, tokenizer_digest="t", model_digest="m", model_names=["m"], block_tokens=64, max_model_len=4096)
    )


SEEN = [sample for sample in SAMPLES if sample.parser in ("harmony", "mistral", "deepseek_v3", "llama3_json", "granite")]


@pytest.mark.parametrize("sample", SEEN, ids=lambda sample: f"{sample.parser}-{SEEN.index(sample)}")
def test_markers_that_are_special_tokens_are_seen(encoder: PromptEncoder, sample: Sample) -> None:
    model_parsers = ModelParsers(sample.parser, sample.thinking)
    tokens = encoder.encode_text(sample.written).tolist()
    (other,) = encoder.encode_text("<|other|>")
    for seed in range(5):
        chance = random.Random(seed)
        choice = Choice(
            encoder,
            encoder.encode_text("prompt"),
            read_options(ChatRequest(), {}),
            (1,),
            model_parsers.create_parser(ParserOptions(Tools(SCHEMAS)), sample.tail),
            encoder.find_special_tokens(model_parsers.collect_markers()),
        )
        given, at, whole = [*tokens, other], 0, OutputDelta()
        while at < len(given):
            size = chance.randint(1, 9)
            last = at + size >= len(given)
            batch = array("I", given[at : at + size]).tobytes()
            whole.add(choice.process(Output("r", batch, 0, "stop" if last else None)))
            at += size
        message = gather(whole.events)
        calls = [(call.name, json.loads(call.arguments)) for call in message.calls]
        assert (message.text, message.reasoning, calls) == (sample.text, sample.reasoning, sample.calls)
        assert choice.finish_reason == "stop" and choice.client_finish_reason == ("tool_calls" if sample.calls else "stop")


def test_forced_calls_of_kimi_are_numbered_after_those_in_the_prompt(encoder: PromptEncoder) -> None:
    prompt = encoder.encode_text("<|tool_call_begin|>functions.now:0 <|tool_call_begin|>functions.now:1 and then")
    forced = ToolUse((Function("now", {}, False, "tools[0].function"),), is_required=True)
    for name, id in (("kimi_k2", "functions.now:2"), ("hermes", "call_")):
        create = OutputParsers(ModelParsers(name), encoder).build_parser_factory(forced.build_constraint(), forced, prompt)
        parser = create()
        assert parser is not None
        (call,) = gather(parser.feed('[{"name": "now", "parameters": {}}]')).calls
        assert call.id.startswith(id)


def test_without_a_parser_special_tokens_are_hidden(encoder: PromptEncoder) -> None:
    stream = encoder.stream()
    assert stream.push(encoder.encode_text("a[TOOL_CALLS]b<|other|>c")) == "abc"
    shown = encoder.find_special_tokens(ModelParsers("mistral").collect_markers())
    assert {encoder.token_text(token) for token in shown} == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}
    assert encoder.stream(shown=shown).push(encoder.encode_text("a[TOOL_CALLS]b<|other|>c")) == "a[TOOL_CALLS]bc"
