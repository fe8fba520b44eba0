"""Runs in the client pod: creates a batch with the openai package, follows it to its end, and prints what its files hold as JSON."""

import io
import json
import sys
import time

import openai

url, model, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = openai.OpenAI(base_url=url, api_key="none", max_retries=5, timeout=60)
lines = [
    {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": model, "messages": [{"role": "user", "content": f"Line {number}: tell me about ships."}], "max_tokens": 8},
    }
    for number in range(count)
]
upload = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
file = client.files.create(file=("requests.jsonl", upload), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
is_announced = False
while batch.status in ("validating", "in_progress", "finalizing"):
    time.sleep(0.2)
    try:
        batch = client.batches.retrieve(batch.id)
    except openai.APIStatusError:  # the batch server is replaced while this runs
        continue
    if not is_announced and batch.request_counts.completed:
        is_announced = True
        print("the first results are stored", file=sys.stderr, flush=True)
results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
print(
    json.dumps(
        {
            "status": batch.status,
            "counts": batch.request_counts.model_dump(),
            "error_file": batch.error_file_id,
            "ids": [result["custom_id"] for result in results],
            "codes": sorted({result["response"]["status_code"] for result in results}),
        }
    )
)
