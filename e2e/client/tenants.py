"""Runs in the client pod: sends the same chat twice with each key, and prints status and cached tokens of each response as JSON."""

import json
import sys

import openai

url, model, prompt, keys = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]


def chat(key: str) -> dict[str, int]:
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)
    try:
        answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": prompt}], max_tokens=1)
    except openai.APIStatusError as error:
        return {"status": error.status_code}
    return {"status": 200, "prompt": answer.usage.prompt_tokens, "cached": answer.usage.prompt_tokens_details.cached_tokens}


print(json.dumps([chat(key) for key in keys for _ in range(2)]))
