"""Runs in the client pod: one streamed chat with the openai package; prints pod, cached tokens, finish reason and text as JSON.

Arguments: URL, model, prompt, most tokens of the answer, and perhaps a cache salt.
"""

import json
import sys
import time

import openai

url, model, prompt, max_tokens = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
salt = {"cache_salt": sys.argv[5]} if sys.argv[5:] else {}
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=180)
started = time.monotonic()
raw = client.chat.completions.with_raw_response.create(
    model=model,
    messages=[{"role": "user", "content": prompt}],
    max_tokens=max_tokens,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"ignore_eos": True, **salt},
)
text, finish, usage, first = "", None, None, 0.0
for chunk in raw.parse():
    if not first:
        first = time.monotonic() - started
        print(f"streaming from {raw.headers.get('x-fairlead-pod')}", file=sys.stderr, flush=True)
    if chunk.choices:
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    usage = chunk.usage or usage
print(
    json.dumps(
        {
            "pod": raw.headers.get("x-fairlead-pod"),
            "cached_header": int(raw.headers.get("x-fairlead-cached-tokens", -1)),
            "predicted": int(raw.headers.get("x-fairlead-predicted-tokens", -1)),
            "cached": usage.prompt_tokens_details.cached_tokens,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish": finish,
            "text": text,
            "ttft": first,
        }
    )
)
