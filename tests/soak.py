"""A soak in a process of its own: prints the anonymous memory that is resident after many requests.

    python tests/soak.py on|off BUDGET_BYTES REQUESTS [LAYERS]

Both modes run the same requests on the same tiny model; the difference is what the cache holds (DECISIONS 25).
"""

from __future__ import annotations

import gc
import random
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvboost import KVBoost


def resident_bytes() -> int:
    """RssAnon of this process."""
    with open("/proc/self/status") as status:
        line = next(x for x in status if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def main(mode: str, budget_bytes: int, requests: int, layers: int = 8) -> None:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=500,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=64,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=499,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    kv = KVBoost(model, cache_bytes=budget_bytes, risk_bound=1e9)  # 16 KiB of KV per token and layer
    rng = random.Random(0)
    documents = [[rng.randrange(3, 490) for _ in range(rng.randrange(20, 180))] for _ in range(150)]
    for _ in range(requests):
        chosen = rng.sample(documents, rng.choice([1, 1, 2, 3]))
        ids = [rng.randrange(3, 490) for _ in range(40)] + [token for document in chosen for token in document]
        report = kv.generate(ids, max_new_tokens=2, do_sample=False, disable=mode == "off").report
        assert mode == "off" or report.fallback is None, report.fallback
        assert kv.store.stats().bytes_used <= budget_bytes
    gc.collect()
    stats = kv.store.stats()
    sys.stdout.write(f"{resident_bytes()} {stats.bytes_used} {sum(stats.evictions.values())}\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
