"""The six requests of a story: what changes from one prompt to the next is what real prompts change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvboost.errors import InputError

Prompt = str | list[Mapping[str, str]]
MakePrompt = Callable[[str, str], Prompt]  # (system, user)

HEAD_DOCUMENTS = 4  # documents of a prompt; one more is the story's new document


@dataclass(frozen=True, slots=True)
class Story:
    """A session over some documents: `system` prompt, at least five documents, and questions about them."""

    name: str
    title: str
    system: str
    documents: Sequence[str]
    questions: Sequence[str]


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a story: what it shows, and the prompt."""

    shows: str
    prompt: Prompt


def make_requests(story: Story, other: Story, make_prompt: MakePrompt) -> Iterator[Request]:
    """Cold, same prefix, timestamp, reordered, subset and new, nothing shared. `other` lends the unshared text.

    `make_prompt` joins a system prompt and a user's text in the way of the model at hand.
    """
    if len(story.documents) <= HEAD_DOCUMENTS:
        raise InputError(f"a story needs at least {HEAD_DOCUMENTS + 1} documents, {story.name!r} has fewer")
    a, b, c, d, new = story.documents[: HEAD_DOCUMENTS + 1]
    ask = [story.questions[i % len(story.questions)] for i in range(5)]
    stamped = f"Current time: 2025-03-14T09:26:53Z, session 4f1d02\n{story.system}"

    def prompt(system: str, documents: Sequence[str], question: str) -> Prompt:
        return make_prompt(system, "\n\n".join([*documents, question]))

    yield Request("cold", prompt(story.system, (a, b, c, d), ask[0]))
    yield Request("same prefix", prompt(story.system, (a, b, c, d), ask[1]))
    yield Request("new timestamp", prompt(stamped, (a, b, c, d), ask[2]))
    yield Request("reordered", prompt(story.system, (c, a, d, b), ask[3]))
    yield Request("subset + new", prompt(story.system, (c, new, b), ask[4]))
    yield Request("nothing shared", prompt(other.system, other.documents[:HEAD_DOCUMENTS], other.questions[0]))
