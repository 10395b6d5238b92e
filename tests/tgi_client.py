"""Run by `test_server_tgi.py` where the `text-generation` client lives: asks a server, writes what it heard as JSON."""

import json
import sys

from text_generation import Client
from text_generation.errors import ValidationError

url, prompt = sys.argv[1:]
client = Client(url)
whole = client.generate(prompt, max_new_tokens=8)
events = list(client.generate_stream(prompt, max_new_tokens=8))
stopped = client.generate(prompt, max_new_tokens=40, stop_sequences=[" very"], return_full_text=True)
drawn = [client.generate(prompt, max_new_tokens=8, do_sample=True, temperature=1.5, seed=3) for _ in range(2)]
chat = client.chat([{"role": "user", "content": prompt}], max_tokens=8, temperature=0.0)
try:
    client.generate(prompt, watermark=True)
    refused = ""
except ValidationError as error:
    refused = str(error)
sys.stdout.write(
    json.dumps(
        {
            "text": whole.generated_text,
            "finish_reason": whole.details.finish_reason.value,
            "tokens": [token.text for token in whole.details.tokens],
            "streamed": "".join(event.token.text for event in events),
            "last": events[-1].generated_text,
            "stopped": stopped.generated_text,
            "stopped_by": stopped.details.finish_reason.value,
            "drawn": [answer.generated_text for answer in drawn],
            "seed": drawn[0].details.seed,
            "chat": chat.choices[0].message.content,
            "refused": refused,
        }
    )
)
