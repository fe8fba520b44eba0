"""A check before the load: the server reads a prompt as the client does, answers with text, and does not stop at the end of sequence.

The client counts tokens of servers that report them beside the last text by the text, which is a few per cent too few. So the number of
output tokens is what was asked for, and this check makes sure that it is.
"""

from transformers import AutoTokenizer

from bench.other_servers.load import OUTPUT, LoadFailed
from bench.other_servers.model import Model
from bench.other_servers.process import Running

QUESTION = "What is the capital of France?"
"""A chat model's answer ends after a few tokens."""


def check_answer(server: Running, model: Model) -> str:
    """Return the greedy answer of the server. Raises LoadFailed if it would be measured unlike the others."""
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    prompt = QUESTION
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": QUESTION}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    text, read, written = server.complete(prompt, OUTPUT)
    if not text.strip():
        raise LoadFailed("the answer is empty")
    if read != (expected := len(tokenizer.encode(prompt))):
        raise LoadFailed(f"it reads the prompt as {read} tokens, the tokenizer as {expected}")
    if written != OUTPUT:
        raise LoadFailed(f"the answer has {written} tokens instead of {OUTPUT}: {text!r}")
    return text
