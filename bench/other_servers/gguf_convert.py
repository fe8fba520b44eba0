"""llama.cpp's converter for a tokenizer that it has no name for: byte-level BPE, split as GPT-2 does. Runs in the peer's environment."""

import runpy
import sys

sources, *arguments = sys.argv[1:]
sys.path.insert(0, sources)

from conversion.base import TextModel  # noqa: E402  # found under the path of the line before

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = ["convert_hf_to_gguf.py", *arguments]
runpy.run_path(f"{sources}/convert_hf_to_gguf.py", run_name="__main__")
