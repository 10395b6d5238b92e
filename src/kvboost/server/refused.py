"""Fields that clients know and this server refuses, each with the reason that the client reads."""

from __future__ import annotations

REASONS = {
    "audio": "the model produces text only",
    "modalities": "the model produces text only",
    "functions": "functions are superseded; send tools",
    "function_call": "functions are superseded; send tools and tool_choice",
    "moderation": "nothing here moderates prompts or answers",
    "reasoning_effort": "the model has no such control",
    "verbosity": "the model has no such control",
    "web_search_options": "the server searches nothing",
    "tool_prompt": "the chat template decides how tools are presented",
    "suffix": "the model continues a prompt and cannot fill in between two texts",
    "adapter_id": "no adapters are loaded",
    "grammar": "decoding is not constrained by a grammar, and asking the model in words would promise too much",
    "guided_json": "decoding is not constrained by a grammar, and asking the model in words would promise too much",
}


def reason_for(field: str) -> str | None:
    """Why a known field is refused; None for a field that nobody knows."""
    return REASONS.get(field)
